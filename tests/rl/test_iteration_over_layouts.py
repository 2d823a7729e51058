"""What a phase has drawn, been rewarded with and is to learn is the same at any layout of training
and of drawing: in turns, with groups that are drawn again; and wherever models wait.
"""

import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from spawning import Row
from table import FAMILIES, Layout
from tiny_models import build, initialize

from dolmen.core.mesh import SINGLE
from dolmen.data.base_loader import Description
from dolmen.rl.config import RolloutConfig
from dolmen.rl.environment import EnvironmentTurn, MultiTurn
from dolmen.rl.generation import GenerationModel
from dolmen.rl.iteration import RolloutBatches, RolloutModels, RolloutSetup
from dolmen.rl.offload import OffloadableMemory, Offloader, offload_parts
from dolmen.rl.prompts import NoValidation, Prompt, PromptLoader, Prompts
from dolmen.rl.rewards import CombinedReward, RuleReward, WeightedReward
from dolmen.rl.rollout import Rollout

CONFIG = RolloutConfig(
    num_generations=2,
    prompts=4,
    max_new_tokens=10,
    max_resamples=2,
    reward_kl_coef=0.1,
    importance_sampling_cap=2.0,
    max_num_seqs=3,
)
ENDS = frozenset(range(0, 50, 4))


class Numbers:
    """A tokenizer whose texts are the ids."""

    def decode(self, tokens, skip_special_tokens):
        return " ".join(map(str, tokens))

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [int(word) for word in text.split()]}


class Nobody:
    """An optimizer that has learned nothing yet."""

    state = {}


def asks(prompt, turns):
    return EnvironmentTurn("7 9" if len(turns) < 4 else None)


def phase(mesh, layout: Layout, tp: int, waits: bool = False) -> Rollout:
    """The first that a run draws; `waits`: what it does not read is away meanwhile."""
    config, schedule = FAMILIES["llama"], layout.make_schedule(8, 1)
    trained, reference = (
        build(config, mesh, layout, schedule, dtype=torch.float64) for _ in range(2)
    )
    initialize(trained, 3)
    initialize(reference, 4)
    drawing = GenerationModel(config.spec, config.training, mesh, tp, torch.float64)
    prompts = [Prompt([n, n + 1], {"prompt": str(n)}, str(n)) for n in range(1, 9)]
    numbers = Numbers()
    loader = PromptLoader(
        Prompts("p", prompts, 2, 0), NoValidation(), 8, numbers, Description(""), {}
    )  # pyright: ignore
    parts = offload_parts(mesh.device, [(trained, Nobody())], drawing.model, [reference])  # pyright: ignore
    judge = RuleReward(lambda answer: float(int(answer.completion.split()[0]) % 2))
    phases = RolloutBatches(
        CONFIG,
        loader,
        RolloutModels(trained, drawing, reference),
        CombinedReward([WeightedReward("odd", 1.0, judge)], "stop", mesh),
        RolloutSetup(
            mesh,
            schedule,
            ENDS,
            16,
            5,
            Path(tempfile.mkdtemp()),
            offloader=Offloader(parts if waits else []),
        ),
        MultiTurn(asks, numbers, 3, True, mesh),  # pyright: ignore
    )
    found = phases._load_or_make(0)
    assert phases.metrics["rollout/resampled_groups"] > 0 and phases.metrics["rollout/turns"] > 0
    return found


def apart(layout: Layout, tp: int) -> dict[str, float]:
    """Of each of what a phase has, the largest difference from one process's."""
    got, want = phase(layout.mesh(torch.device("cpu")), layout, tp), phase(SINGLE, Layout(), 1)
    width = min(got.tokens.shape[1], want.tokens.shape[1])  # of rows that are filled up
    assert want.advantages.any() and len(want.rewards.unique()) == 2
    return {
        name: float((one[..., :width] - getattr(want, name)[..., :width]).abs().max())
        for name, one in vars(got).items()
        if name not in ("rewards", "experts")  # of which nobody asks here
    } | {"rewards": float((got.rewards - want.rewards).abs().max())}


def test_where_models_wait_changes_nothing_of_what_is_drawn_again(monkeypatch):
    """Of what goes away without a copy nothing is left, whatever the memory comes back with."""
    offload, gone = OffloadableMemory.offload, []

    def forgotten(self):
        if not (self.keep or self.offloaded):
            gone.append(self)
            with torch.no_grad():
                for one in self.tensors():
                    one.fill_(torch.nan)
        offload(self)

    want = phase(SINGLE, Layout(), 1)
    monkeypatch.setattr(OffloadableMemory, "offload", forgotten)
    got = phase(SINGLE, Layout(), 1, waits=True)
    assert len(gone) > 2
    for name, one in vars(want).items():
        assert torch.equal(one, getattr(got, name)), name


ROWS = [
    Row(f"{words} draws {tp}", layout.world, partial(apart, layout, tp))
    for words, tp in (("tp2 pp2 acc4", 1), ("cp2 dp2 zero3", 2))
    for layout in (Layout.of(words),)
]


@pytest.mark.spawn
@pytest.mark.parametrize("row", [row.parameter for row in ROWS])
def test_layout_never_changes_what_is_drawn(row, result):
    """Log-probabilities are told in fp32; which tokens they are of is exact."""
    found = result(row)
    assert found["tokens"] == found["labels"] == found["rewards"] == 0
    assert max(found.values()) < 1e-5, found
