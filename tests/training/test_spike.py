"""The spike policy: what is a spike, what is remembered, and that a resumed run decides as one
never stopped.
"""

import json
import math
import shutil

import pytest
import tinyrun
from tinyrun import dolmen, losses, rows, same, tensors

from dolmen.training.state import LEAST, WINDOW, SpikePolicy

material, one_thread = tinyrun.material, tinyrun.one_thread


def fed(policy: SpikePolicy, *norms: float) -> list[bool]:
    return [policy.allow(norm) for norm in norms]


def test_over_the_factor_times_the_median():
    policy = SpikePolicy(3.0)
    assert all(fed(policy, *[1.0, 2.0, 3.0] * 8))
    assert fed(policy, 6.0, 6.1, 2.0) == [True, False, True]  # the median is 2


def test_a_start_has_no_usual():
    policy = SpikePolicy(2.0)
    assert all(fed(policy, *[10.0**i for i in range(LEAST)])) and not policy.allow(1e20)


def test_a_lasting_change_becomes_the_usual():
    policy = SpikePolicy(2.0)
    fed(policy, *[1.0] * WINDOW)
    answers = fed(policy, *[5.0] * WINDOW)
    # of the window, itself not yet in it
    assert answers.index(True) == WINDOW // 2 and all(answers[WINDOW // 2 :])


def test_what_is_not_finite_is_refused_and_forgotten():
    for policy in (SpikePolicy(2.0), SpikePolicy()):
        assert fed(policy, math.nan, math.inf, 1.0) == [False, False, True] and policy.state() == [
            1.0
        ]


def test_without_a_factor_nothing_is_a_spike():
    assert all(fed(SpikePolicy(), *[1.0] * 40, 1e30))


def test_state_goes_through_json_exactly():
    policy = SpikePolicy(1.2)
    other = SpikePolicy(1.2)
    chance = [math.sin(i) + 1.5 for i in range(200)]
    fed(policy, *chance[:90])
    other.load(json.loads(json.dumps(policy.state())))
    assert fed(policy, *chance[90:]) == fed(other, *chance[90:]) and policy.state() == other.state()


def test_a_run_that_skips_spikes_resumes_bitwise(material, tmp_path):
    """A factor so small that every few steps are spikes; told on screen; the step after a resume
    decides by norms before it.
    """
    words = (
        "--train.spike",
        "skip",
        "--train.spike-factor",
        1.02,
        "--train.global-batch-size",  # norms of single sequences differ enough
        1,
        "--train.max-skipped-steps",
        100,
        "--log.validate-every",
        0,
    )
    one, two = tmp_path / "one", tmp_path / "two"
    assert dolmen("train", material.file, "--out", one, "--train.steps", 24, *words).code == 0
    assert (
        dolmen(
            "train",
            material.file,
            "--out",
            two,
            "--train.steps",
            24,
            *words,
            "--checkpoint.every",
            18,
        ).code
        == 0
    )
    shutil.rmtree(two / "checkpoints" / "step-00000024")  # as if killed before
    again = dolmen("train", two / "config.yaml", "--resume")
    assert (
        again.code == 0
        and "resuming from step 18" in again.out
        and "times its running median, the step is skipped" in again.out
    )
    assert (
        losses(two) == losses(one)
        and same(tensors(two, 24), tensors(one, 24))
        and len(rows(two)) == 24
    )


@pytest.mark.parametrize(
    "words, said",
    [
        (("--train.spike-factor", 1), "train.spike-factor is 1.0: it must be over 1"),
        (("--train.max-skipped-steps", 0), "train.max-skipped-steps is 0"),
        (("--train.hang-seconds", 0), "train.hang-seconds is 0.0: it must be over 0"),
    ],
)
def test_nonsense_is_refused(material, tmp_path, words, said):
    result = dolmen("train", material.file, "--out", tmp_path / "out", *words)
    assert result.code == 2 and said in result.words
