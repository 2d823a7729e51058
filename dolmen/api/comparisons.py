"""A model beside another program's: `verify`, `diff`."""

from pathlib import Path
from typing import Any

from dolmen.api.asked import asked_of, value_errors
from dolmen.comparison import diff as difference
from dolmen.comparison import report as differing
from dolmen.comparison.config import DiffConfig
from dolmen.conversion.source import open_source
from dolmen.evaluation import verify as comparison
from dolmen.evaluation.compare import Report
from dolmen.evaluation.config import VerifyConfig
from dolmen.families import unknown


def verify(folder: str | Path, against: str | Path | None = None, length: int = 64) -> Report:
    """`dolmen verify FOLDER` in this process: dolmen on `folder` beside transformers on `against`
    (unset: the same), on `length` random tokens in float32. `report.ok` says whether all is within
    tolerance, `report.rows` has each difference. Raises ValueError on bad input.

        assert dolmen.verify("path/to/model").ok
    """
    with value_errors():
        asked = asked_of(VerifyConfig, folder=folder, against=against, length=length)
        source = open_source(asked.folder)
        other = None if asked.against is None else open_source(asked.against)
        for one in (source, other or source):
            unknown.warn(one.model)
        return comparison.verify(source, other, length=asked.length)


def diff(
    first: str | Path,
    second: str | Path = difference.THEIRS,
    **options: Any,
) -> differing.Report:
    """`dolmen diff FIRST SECOND`: the first tensor in which two programs of one model part, by
    default dolmen and transformers. `options` are those of the command: `a` and `b` say how each
    side is computed, `optimizer` what the update is, in mappings. `report.ok` says whether they are
    the same, `report.parting` where they part, `print(report)` both in words. Raises ValueError on
    bad input, RuntimeError if a process that it starts for a layout fails.

        print(dolmen.diff("path/to/model", a={"layout": {"tp": 2}, "dtype": "bfloat16"}))
    """
    with value_errors():
        asked = asked_of(DiffConfig, ("json",), first=first, second=second, **options)
        return difference.diff(asked)
