"""dolmen tokenize --data.path TEXT --data.tokenizer DIR --to PREFIX"""

from dolmen.core.messages import BadInput, escape, message, plural
from dolmen.data.config import TokenizeConfig
from dolmen.data.indexed_export import tokenize


def run(options: TokenizeConfig) -> int:
    try:
        made = tokenize(options)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    print(
        f"wrote {escape(made.file)} and its .idx: {plural(made.tokens, 'token')} of "
        f"{plural(made.documents, 'document')}, {made.dtype}"
    )
    return 0
