"""Exact numerics in RL: log-probabilities of sampled tokens have the bits that the trained model
gives them, whatever the layouts of both, with paging, prompts read in parts, shared prefixes and
preemption.
"""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from spawning import Row, made_once
from table import Layout
from tiny_models import Flat, Tiny, build, initialize

from dolmen.core.mesh import SINGLE
from dolmen.data.batch import Batch
from dolmen.model.spec import LayerRun, NormSpec
from dolmen.model.training import Training
from dolmen.objectives import forward
from dolmen.ops import invariant
from dolmen.ops.attention import Attend, blockwise
from dolmen.ops.numerics import Exact
from dolmen.rl.generation import GenerationModel
from dolmen.rl.rollout import Rollout, make_rollout
from dolmen.serving import sampling
from dolmen.serving.engine import Engine
from dolmen.serving.request import Limits, Request, SamplingParams
from dolmen.serving.scheduler import Scheduler

LENGTH, NEW = 160, 24  # blocks of 128 queries and 32
FLAT = Flat(
    vocab_size=71,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    qk_norm=True,
    initializer_range=0.2,
)
_windowed = replace(FLAT.block(0), mixer=replace(FLAT.block(0).mixer, window=20, soft_cap=3.0))
_other = replace(
    FLAT.block(0), norm=NormSpec("layernorm", bias=True), mlp=replace(FLAT.block(0).mlp, bias=True)
)
CONFIG = Tiny(
    replace(FLAT.spec, runs=(LayerRun((_windowed, _other), 1),)),
    replace(FLAT.training, exact=Exact(4, LENGTH)),
)
PROMPTS = [list(range(1, 1 + n)) for n in (3, 60, 70, 40)]
PROMPTS[2] = [n % 71 for n in range(5, 5 + 124)]  # continued over the end of a block


def sample(generator: GenerationModel, limits: Limits) -> dict[tuple[int, int], list]:
    """Two completions of each prompt: its tokens and log-probabilities."""
    params = SamplingParams(temperature=1.0, max_new_tokens=NEW)
    found = {}
    with Engine(generator.model, mesh=generator.mesh, limits=limits) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.add(Request(prompt, params, id=i, seed=1, samples=2, logprobs="processed"))
        while engine.busy:
            for done in engine.step().finished:
                logprobs = [each.logprob for each in done.logprobs]
                found[done.number, done.sample] = [done.tokens, logprobs]
    return found


def rollout_of(found: dict[tuple[int, int], list]) -> Rollout:
    keys = sorted(found)
    prompts, tokens = [PROMPTS[i] for i, _ in keys], [found[key][0] for key in keys]
    return make_rollout(prompts, tokens, [found[key][1] for key in keys], LENGTH, LENGTH)


TIGHT = Limits(rows=6, tokens=50, pages=20, page=8)
"""Prompts are read in parts, and the pages do not suffice for all."""


def trained_on(mesh, layout: Layout, dtype: torch.dtype = torch.float32):
    schedule = layout.make_schedule(8, 2)
    model = build(CONFIG, mesh, layout, schedule, compute=dtype)
    initialize(model, 3)
    return model, schedule


@cache
def sampled_alone(training: Training, dtype: torch.dtype) -> dict[tuple[int, int], list]:
    """What one process samples, without limits."""
    alone = GenerationModel(CONFIG.spec, training, SINGLE, 1, dtype)
    alone.load_weights(trained_on(SINGLE, Layout())[0])
    return made_once(lambda: sample(alone, Limits()))


def difference(
    layout: Layout, tp: int = 1, dtype: torch.dtype = torch.float32, training=CONFIG.training
) -> tuple[float, bool, bool]:
    """The largest difference of log-probabilities, whether a sequence was preempted, and whether
    tokens and numbers are those of one process without limits. `training`: of the generator.
    """
    mesh = SINGLE if layout.world == 1 else layout.mesh(torch.device("cpu"))
    model, schedule = trained_on(mesh, layout, dtype)
    generator = GenerationModel(CONFIG.spec, training, mesh, tp, dtype, layout.pp)
    generator.load_weights(model)
    preempted, preempt = [], Scheduler.preempt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "preempt", lambda *given: (preempted.append(1), preempt(*given)))
        found = sample(generator, TIGHT)
    rollout = rollout_of(found)
    rows = len(rollout.tokens) // mesh.dp.size
    mine = slice(mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows)
    batch = Batch(rollout.tokens[mine], rollout.labels[mine])
    got = forward.log_probabilities(model, batch, mesh, schedule)
    apart = float((got - rollout.sampled_logprobs[mine]).abs().max())
    return apart, len(preempted) > 0, found == sampled_alone(training, dtype)


HALF = torch.bfloat16
LAYOUTS = [
    ("tp2 zero1 fixed", 1, torch.float32),
    ("tp2 sp zero1 fixed", 2, torch.float32),
    ("dp2 zero3 fixed", 1, torch.float32),
    ("dp2 zero3 fixed", 2, torch.float32),
    ("pp2 acc4 zero1 fixed", 1, torch.float32),
    ("tp2 sp zero1 fixed", 1, HALF),
    ("dp2 zero3 fixed", 2, HALF),
]
ROWS = [
    Row(
        f"{words}, generator tp {tp}{' bf16' * (dtype == HALF)}",
        layout.world,
        partial(difference, layout, tp, dtype),
    )
    for words, tp, dtype in LAYOUTS
    for layout in (Layout.of(words),)
]


@pytest.mark.spawn
@pytest.mark.parametrize("row", [row.parameter for row in ROWS])
def test_sampled_log_probabilities_have_the_bits_of_the_trained_model(row, result):
    assert result(row) == (0.0, True, True)


def test_one_process_has_them_too():
    assert difference(Layout()) == (0.0, True, True)


# what is damaged in the generator alone, or in the way its numbers are computed
DAMAGES = {
    "attention to as many keys as there are": (
        blockwise,
        "cached_attention",
        lambda q, k, v, attend, length: blockwise.attention(q, k, v, attend),
    ),
    "a softmax in fp64": (
        sampling,
        "exact_log_probabilities",
        lambda logits, tokens, block: sampling.log_probabilities(logits, tokens, 0)[:, 0],
    ),
    "products of a few rows": (invariant, "product", torch.mm),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_other_operators_are_seen(name, monkeypatch):
    monkeypatch.setattr(*DAMAGES[name])
    sampled_alone.cache_clear()
    assert difference(Layout())[0] > 0
    sampled_alone.cache_clear()


def test_fast_numerics_are_seen():
    assert difference(Layout(), training=FLAT.training)[0] > 0


@pytest.mark.parametrize("length", [100, 160, 300, 4096])
def test_attention_of_the_last_queries_has_the_bits_of_whole_sequences(length):
    """Wherever blocks of queries end; sequences of 4,096 tokens have blocks of 256."""
    heads, attend = (4, 2, 2), Attend(window=70)
    seeded = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, n, 8, generator=seeded) for n in heads)
    whole = blockwise.attention(q, k, v, attend)
    for past, new in ((0, 1), (0, 99), (50, 1), (40, 60), (length - 1, 1), (length - 70, 70)):
        keys = past + new
        part = blockwise.cached_attention(q[:, past:keys], k[:, :keys], v[:, :keys], attend, length)
        assert torch.equal(part, whole[:, past:keys])
