"""dolmen convert SOURCE DESTINATION --to FORMAT"""

import sys

from dolmen.conversion.config import ConvertConfig
from dolmen.conversion.convert import convert
from dolmen.core.messages import BadInput, Failed, message


def run(options: ConvertConfig) -> int:
    try:
        print(convert(options, shown=True))
    except Failed as error:
        print(f"dolmen convert: {error}; nothing is left of it", file=sys.stderr)
        return 1
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    return 0
