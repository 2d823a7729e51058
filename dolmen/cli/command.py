"""From the words after `dolmen VERB` to the configuration that the verb's `run` takes."""

from pathlib import Path
from typing import Any

from dolmen.cli import help
from dolmen.cli.options import HANDED, PARTS, RUNS, VERBS, find
from dolmen.cli.parse import HELP, groups, options, parse
from dolmen.core.config import from_dict, unflatten
from dolmen.core.messages import BadInput, message


def read(verb: str, argv: list[str]) -> Any:
    """The configuration that the words after `dolmen VERB` give. Exits with 0 after --help. Raises
    BadInput.
    """
    try:
        if verb in RUNS:
            # recipes and families take a tenth of a second, and no other verb needs them
            from dolmen.cli.runs import parse_run

            return parse_run(verb, argv)
        if verb in PARTS:
            return parse_part(verb, argv)
        return parse_config(find(VERBS[verb]), verb, argv)
    except BrokenPipeError:  # who reads the help has left
        raise
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None


def parse_config(cls: type[Any], verb: str, argv: list[str]) -> Any:
    """A `cls` with the options `argv`. Exits with 0 after --help. Raises BadInput or ValueError."""
    found = groups(cls)
    if HELP & set(argv):
        print(help.full(verb, cls.__doc__ or "", found))
        raise SystemExit(0)
    config: Any = from_dict(cls, unflatten(parse(argv, options(found), verb)))
    if verb == "generate":
        config.check_source()
    return config


def parse_part(verb: str, argv: list[str]) -> Any:
    """The configuration of a part of a verb, which the first word names. Exits with 0 after --help.
    Raises BadInput or ValueError.
    """
    about, parts = PARTS[verb]
    named = argv[0] if argv else ""
    if named in parts:
        return parse_config(find(parts[named]), f"{verb} {named}", argv[1:])
    if named in HELP:
        print(f"usage: dolmen {verb} {{{','.join(parts)}}} ...\n\n{about}\n")
        print("\n".join(f"  dolmen {verb} {part} --help says more" for part in parts))
        raise SystemExit(0)
    said = f"{named} is none of them" if named else "say which part"
    raise BadInput(f"{said}: dolmen {verb} has {', '.join(parts)}")


def take(verb: str, file: Path) -> Any:
    """What our launcher hands its workers in `file`, as `read` gave it there. Raises BadInput."""
    from dolmen.files import gate, kinds  # YAML, which no help needs

    cls = find(HANDED.get(verb) or VERBS[verb])
    try:
        return from_dict(cls, gate.read_yaml(file, kinds.RUN))
    except ValueError as error:
        raise BadInput(message(error)) from None
