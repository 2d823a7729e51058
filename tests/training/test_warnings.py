"""Warnings before the first step come just beyond their bounds, and who follows their advice gets
none.
"""

import math
import re
from types import SimpleNamespace

import pytest

from dolmen.training.checks import warn


def advised(text: str | None, option: str) -> int:
    """The number that a warning advises for an option."""
    assert text is not None
    found = re.search(rf"--{option} (\d+)", text)
    assert found, text
    return int(found[1])


def warmup(steps: float, of: int) -> str | None:
    run = SimpleNamespace(warmup_steps=steps, optimizer=SimpleNamespace(lr=0.5))
    return warn.warmup_over_run(run, of)


def test_a_warmup_is_shorter_than_its_run():
    assert warmup(9, 10) is None and warmup(0, 1) is None
    # a run of one step has nothing but its first
    assert warmup(1, 1) is None and warmup(0.5, 1) is None
    text = warmup(10, 10)
    assert text and text.startswith("optimizer.warmup-steps (10) are all steps of the run")
    assert "reaches 0.5 in the last step" in text
    assert warmup(advised(text, "optimizer.warmup-steps"), 10) is None
    assert advised(warmup(40, 40), "optimizer.warmup-steps") == 4
    longer = warmup(24.2, 10)
    assert longer and "(25) exceeds the run's 10 steps" in longer
    assert "ends at 0.2 and never reaches 0.5" in longer
    assert advised(longer, "optimizer.warmup-steps") == 9
    assert warmup(25, advised(longer.replace("over ", ""), "train.steps") + 1) is None
    assert advised(warmup(2, 1), "optimizer.warmup-steps") == 1
    assert advised(warmup(2, 2), "optimizer.warmup-steps") == 1


def epoch(batch: int, sizes: dict[str, int], rollouts: bool = False) -> str | None:
    run = SimpleNamespace(
        train=SimpleNamespace(global_batch_size=batch),
        objective=SimpleNamespace(uses_rollouts=rollouts),
    )
    mixture = SimpleNamespace(epochs=lambda n: {name: n / size for name, size in sizes.items()})
    return warn.batch_over_epoch(run, SimpleNamespace(mixture=mixture))


def test_a_batch_is_no_larger_than_an_epoch():
    assert epoch(64, {"a": 64}) is None and epoch(999, {"a": 64}, rollouts=True) is None
    # a source that lasts longer is enough
    assert epoch(64, {"a": 8, "b": 64}) is None
    text = epoch(160, {"a": 8, "b": 64})
    assert text and "(160) exceeds an epoch of the training data (64 sequences)" in text
    assert "reads every sequence 2.5 times" in text
    assert epoch(advised(text, "train.global-batch-size"), {"a": 8, "b": 64}) is None


def test_a_profiled_step_is_one_of_the_runs():
    def text(number: int | None, step: int, steps: int) -> str | None:
        run = SimpleNamespace(log=SimpleNamespace(profile=number))
        return warn.profile_out_of_range(run, step, steps)

    assert text(None, 3, 9) is None
    shown = {number: text(number, 3, 9) for number in range(12)}
    assert [number for number, found in shown.items() if found is None] == [4, 5, 6, 7, 8, 9]
    assert shown[3] and "from step 4 to 9" in shown[3]
    assert advised(shown[10], "log.profile") == 5 and advised(text(1, 8, 9), "log.profile") == 9


def test_rows_without_tokens_are_padding_up_to_a_bound():
    assert warn.unused_rows(1000, 872) is None  # 128
    assert warn.unused_rows(50_000, 45_000) is None  # a tenth
    for vocab_size, tokens in ((1000, 871), (50_000, 44_999)):
        text = warn.unused_rows(vocab_size, tokens)
        assert text and f"{vocab_size - tokens:,} rows" in text
        assert warn.unused_rows(advised(text, "model.vocab-size"), tokens) is None


def split(held_out: int, share: float, asked: float = 0.1, unit: str = "token", **data):
    options = {"validation": None, "order": "dolmen", "validation_fraction": asked} | data
    run = SimpleNamespace(sequence_length=8, data=SimpleNamespace(**options))
    loader = SimpleNamespace(
        validation_tokens=held_out, unit=unit, validation_share=lambda length: (share, 100 * length)
    )
    return warn.small_validation_split(run, loader)


def test_a_validation_split_has_a_batch_and_a_fifth_of_what_was_asked_for():
    assert split(800, 0.02) is None and split(0, 0) is None
    few = split(799, 0.1)
    assert few == (
        "the validation text has 799 tokens (10.00% of the text, 10.00% requested), and a batch "
        "800: its loss is noisy; use a larger --data.validation-fraction, or give "
        "--data.validation"
    )
    assert "(1.90% of the pairs, 10.00% requested)" in (split(9000, 0.019, unit="pair") or "")
    # of a set of its own, or in Megatron's order, no share was asked for
    for more in ({"validation": "set"}, {"order": "megatron"}):
        assert split(800, 0.001, **more) is None
        text = split(7, 0.001, **more)
        assert text and text.startswith("the validation text has 7 tokens, and a batch 800: ")
        assert text.endswith("use more text in --data.validation")


@pytest.mark.parametrize("parts", (1, 2))
@pytest.mark.parametrize("share", (0.0, 0.5))
def test_a_new_language_alone_forgets_the_old_one(parts, share):
    run = SimpleNamespace(train=SimpleNamespace(new_rows=SimpleNamespace(share=share)))
    loader = SimpleNamespace(mixture=SimpleNamespace(parts=[None] * parts))
    assert (warn.no_replay_source(run, loader) is not None) == (parts == 1 and share > 0)


@pytest.mark.parametrize("validation", (None, "set"))
@pytest.mark.parametrize(
    "parts, by_source, asked", ((2, {}, True), (1, {}, True), (2, {"a": 1}, True), (2, {}, False))
)
def test_sources_are_validated_where_they_have_text(parts, by_source, asked, validation):
    run = SimpleNamespace(
        log=SimpleNamespace(validate_sources=asked), data=SimpleNamespace(validation=validation)
    )
    mixture = SimpleNamespace(parts=[None] * parts)
    loader = SimpleNamespace(validation_by_source=by_source, mixture=mixture)
    text = warn.one_validation_source(run, loader)
    assert (text is not None) == (asked and parts == 2 and not by_source)
    if text:
        own = "data.validation is not per source: leave it out"
        fraction = "have validation text: set a larger --data.validation-fraction"
        assert text.endswith(own if validation else fraction)


def mismatch(
    ratio: float, weights: str = "whole", dtype: str = "float32", objective="ppo", cap=None
):
    run = SimpleNamespace(
        rollout=SimpleNamespace(weights=weights, importance_sampling_cap=cap),
        train=SimpleNamespace(dtype=dtype),
        objective=SimpleNamespace(name=objective),
    )
    metrics = {warn.MISMATCH: ratio, "rollout/logprob_difference": 0.0123}
    return warn.logprob_mismatch(run, metrics, 7)


def test_log_probabilities_that_differ_are_told_where_nothing_explains_it():
    assert mismatch(1.0) is None and mismatch(9.0, weights="int8") is None
    assert (
        warn.logprob_mismatch(SimpleNamespace(rollout=SimpleNamespace(weights="")), {}, 1) is None
    )
    none = mismatch(math.nan, weights="int8")
    assert none and none.endswith(f"a log-probability is not finite ({warn.MISMATCH})")
    text = mismatch(1.01)
    assert text and text.startswith("after step 7") and "1.01 times as far off" in text
    assert "on average by 0.012" in text and "indicates a fault" in text
    for dtype in ("bfloat16", "float16"):
        rounding = mismatch(2.0, dtype=dtype)
        assert rounding and f"Rounding to {dtype} can explain it: --train.dtype" in rounding
        advice = "--rollout.importance-sampling-cap 2 corrects"
        assert advice in (mismatch(2.0, dtype=dtype, objective="grpo") or "")
        assert advice not in (mismatch(2.0, dtype=dtype, objective="grpo", cap=2.0) or "")


def test_equal_rewards_are_told_with_their_value():
    text = warn.constant_reward({"rollout/reward": 0.25})
    assert "were equal, in the last iteration 0.25: advantages were 0" in text
