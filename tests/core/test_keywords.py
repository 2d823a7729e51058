"""Refusals that name options, as Python spells them."""

import pytest

from dolmen.core.messages import python_spelling

KEYWORDS = {
    name: name
    for name in (
        "train.global_batch_size",
        "train.compile",
        "layout.tp",
        "top_k",
        "out",
        "to",
        "resume",
    )
} | {"data.path": "path"}


@pytest.mark.parametrize(
    "message, said",
    [
        ("use --layout.tp 2, or 1", "use layout.tp 2, or 1"),
        (
            "train.global-batch-size (4): set --train.global-batch-size.",
            "train.global_batch_size (4): set train.global_batch_size.",
        ),
        ("use --train.no-compile, or", "use train.compile=False, or"),
        (
            "use --resume: train.compile, --train.compile",
            "use resume=True: train.compile, train.compile=True",
        ),
        ("--top-k draws: add --top-k=1", "top_k draws: add top_k=1"),
        ("write to --out, not out", "write to out, not out"),
        ("--data.path is empty", "path is empty"),
        (
            "use --to (dolmen export a --to b) or --out: dolmen train c.yaml --layout.tp 2",
            "use to (dolmen export a --to b) or out: dolmen train c.yaml --layout.tp 2",
        ),
        # what is no option, or part of a name of the user's
        ("a/layout.tp, layout.tp/x, --layout.tp.txt", "a/layout.tp, layout.tp/x, --layout.tp.txt"),
        ("--no-such and --layout.tpp", "--no-such and --layout.tpp"),
    ],
)
def test_in_python(message, said):
    assert python_spelling(message, KEYWORDS, ["train.compile", "resume"]) == said
