"""The order in which prompts and completions are read: each once per epoch, by the seed, and what
is reported of them.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dolmen.rl.iteration import RolloutBatches
from dolmen.rl.prompts import NoValidation, Prompt, Prompts


def prompts(count: int, repeats: int, seed: int = 3) -> Prompts:
    rows = [Prompt([i] * (i + 1), {"prompt": f"text {i}"}, f"row {i}") for i in range(count)]
    return Prompts("file", rows, repeats, seed)


def test_each_epoch_is_a_permutation_of_its_own():
    some, other = prompts(7, 2), prompts(7, 2, seed=4)
    epochs = [[some.index(7 * epoch + i) for i in range(7)] for epoch in range(4)]
    epochs += [[some.index(i, attempt) for i in range(7)] for attempt in (1, 2)]
    epochs += [[other.index(i) for i in range(7)]]
    assert all(sorted(epoch) == [*range(7)] for epoch in epochs)
    assert len({*map(tuple, epochs)}) == len(epochs)
    assert epochs[0] == [prompts(7, 5).index(i) for i in range(7)], "whatever the repeats"


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_samples_are_of_the_prompts_that_are_repeated(repeats):
    some = prompts(4, repeats)
    for first in range(2 * 4 * repeats):
        for count in range(1, 9):
            numbers = dict.fromkeys(sample // repeats for sample in range(first, first + count))
            expected = [f"file: row {some.index(number)}" for number in numbers]
            assert some.documents(first, count) == expected
        assert some.epochs(first) == {"file": first / repeats / 4}


def test_statistics_see_each_prompt_as_a_document():
    (part,) = prompts(4, 2).parts
    assert (part.name, part.weight, len(part.stream)) == ("file", 1, 1 + 2 + 3 + 4)
    assert part.stream.read(0, 10).tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert [*NoValidation().batches(1, rank=0)] == []


def test_a_prompt_is_a_text_or_messages():
    messages = [{"role": "user", "content": "a"}]
    assert Prompt([1], {"answer": 1, "messages": messages}, "").content is messages
    assert Prompt([1], {"prompt": "a", "answer": 1}, "").content == "a"


def batches(batch_size: int, completions: int, seed: int = 0) -> Any:
    """Rollout batches, without models, that note which iterations are made."""
    self: Any = object.__new__(RolloutBatches)
    self.batch_size, self.completions, self.updates = batch_size, completions, 0
    self.setup, self.made = SimpleNamespace(seed=seed), []
    self._load_or_make = lambda step: self.made.append(step) or step
    self._make_batch = lambda rollout, order: (rollout, order.tolist())
    return self


def test_each_epoch_of_an_iteration_reads_each_completion_once():
    some = batches(4, 12)
    for first_step in (0, 6):
        updates = [some._order(update, first_step) for update in range(6)]
        epochs = [torch.cat(updates[:3]).tolist(), torch.cat(updates[3:]).tolist()]
        assert [sorted(epoch) for epoch in epochs] == [[*range(12)]] * 2 and epochs[0] != epochs[1]
    orders = [batches(12, 12, seed)._order(0, step).tolist() for seed in (0, 1) for step in (0, 1)]
    assert len({*map(tuple, orders)}) == 4


def test_ranks_share_each_batch_and_a_resumed_run_reads_the_rest():
    """Steps 0 to 7 of iterations of three updates, on one rank, on two, and from step 4 on."""

    def read(step: int, rank: int = 0, ranks: int = 1) -> list:
        some = batches(4, 12)
        some.updates = 3
        steps = [*zip(range(8 - step), some.starting_at(step, rank, ranks), strict=False)]
        return [some.made, *(found for _, found in steps)]

    made, *whole = read(0)
    assert made == [0, 3, 6] and [(now, batch[0]) for now, batch in whole] == [
        (now, now - now % 3) for now in range(8)
    ]
    halves = [read(0, rank, 2)[1:] for rank in range(2)]
    for (_, (_, rows)), (_, (_, first)), (_, (_, second)) in zip(whole, *halves, strict=True):
        assert rows == first + second and len(first) == 2
    assert read(4) == [[3, 6], *whole[4:]]
