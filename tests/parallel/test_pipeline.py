"""The executor on real processes: it does what the list says, in its order, holds what the list
holds, and whatever valid order a list has, nothing waits for ever. Gradients of whole models are
the golden table's business (tests/golden).
"""

import random
import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from spawning import run_spawned

from dolmen.core import mesh as meshes
from dolmen.core.mesh import Axis
from dolmen.parallel import pipeline, tensor
from dolmen.parallel.data import Reduction
from dolmen.parallel.pipeline import StepWork, forward_only
from dolmen.parallel.schedule import Action, Schedule
from dolmen.parallel.simulation import SCHEDULES, check_schedule, make_schedule, simulate
from dolmen.parallel.tensor import Deferred, TensorParallel

CHUNKS = {"interleaved": 2, "zero-bubble-v": 2}
MICROS, ROWS, SIZE = 8, 3, 4


class Kept(torch.autograd.Function):
    """The identity, which keeps one tensor for its backward and counts how many of them
    are alive.
    """

    @staticmethod
    def forward(ctx, x, alive):
        ctx.kept = torch.zeros(1)
        alive.add(ctx.kept)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g, None


def shuffled(schedule: Schedule, seed: int) -> Schedule:
    """Another valid order: neighbours in a rank's list are swapped where no dependency
    forbids it.
    """
    lists, chance = [list(actions) for actions in schedule.actions], random.Random(seed)
    for _ in range(300):
        actions = chance.choice(lists)
        i = chance.randrange(len(actions) - 1)
        actions[i : i + 2] = actions[i + 1], actions[i]
        try:
            check_schedule(
                Schedule(
                    "file",
                    schedule.ranks,
                    schedule.micros,
                    schedule.chunks,
                    tuple(map(tuple, lists)),
                    schedule.placement,
                )
            )
        except ValueError:
            actions[i : i + 2] = actions[i + 1], actions[i]
    return Schedule(
        "file",
        schedule.ranks,
        schedule.micros,
        schedule.chunks,
        tuple(map(tuple, lists)),
        schedule.placement,
    )


def joined(schedule: Schedule) -> Schedule:
    """Of one rank every other I and its W are one B."""
    out = [list(actions) for actions in schedule.actions]
    for micro in range(0, schedule.micros, 2):
        out[1].remove(Action("W", micro))
        out[1][out[1].index(Action("I", micro))] = Action("B", micro)
    return check_schedule(
        Schedule("file", schedule.ranks, schedule.micros, 1, tuple(map(tuple, out)))
    )


class RecordedReduction(Reduction):
    """Records what the executor says of each backward that makes weight gradients."""

    def __init__(self, split_backward: bool):
        super().__init__(torch.nn.Module(), 0, split_backward)
        self.calls: list[tuple[bool, ...]] = []

    def prepare_backward(self, chunk, last_of_chunk, last):
        self.calls.append((last_of_chunk, last))

    def accumulate_weight_gradients(self, last):
        self.calls.append((last,))


def expected_calls(schedule: Schedule, rank: int) -> list[tuple[bool, ...]]:
    """What RecordedReduction should record: whether no later action of the list makes weight
    gradients of the same chunk, where backward is whole, and whether none does of any chunk.
    """
    chunks = [action.chunk for action in schedule.actions[rank] if action.kind in ("B", "W")]
    ends = [(chunk not in chunks[i + 1 :], i + 1 == len(chunks)) for i, chunk in enumerate(chunks)]
    return [end[1:] for end in ends] if schedule.splits_backward else ends


def run(schedule: Schedule, mesh) -> dict:
    """A stack of square matrices, one a stage: what was done, most activations alive, and how far
    gradients are from autograd's.
    """
    later = Deferred() if schedule.splits_backward else None
    tp, generator = TensorParallel(Axis("tp"), later=later), torch.Generator().manual_seed(3)
    every = [
        torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
        for _ in range(schedule.stages)
    ]
    inputs = torch.randn(schedule.micros, ROWS, SIZE, generator=generator, dtype=torch.float64)
    mine = {
        chunk: torch.nn.Parameter(every[schedule.stage_of(mesh.pp.rank, chunk)].clone())
        for chunk in range(schedule.chunks)
    }
    done, alive, most = [], weakref.WeakSet(), 0

    def forward(chunk: int, micro: int, x):
        stage = schedule.stage_of(mesh.pp.rank, chunk)
        linear = tensor.Linear(mine[chunk])
        y = tensor.columns(inputs[micro] if x is None else x, [linear], tp)[0].tanh()
        if torch.is_grad_enabled():
            y = Kept.apply(y, alive)
        return y.square().sum() if stage == schedule.stages - 1 else y

    def observe(action: Action):
        nonlocal most
        done.append(action)
        most = max(most, len(alive))

    reduction = RecordedReduction(schedule.splits_backward)
    parts = [()] * schedule.chunks
    pipeline.execute(
        schedule,
        mesh,
        StepWork(
            forward,
            lambda: torch.empty(ROWS, SIZE, dtype=torch.float64),
            reduction,
            parts,
            later,
            observe,
        ),
    )
    whole = [w.requires_grad_() for w in every]
    for x in inputs:
        for w in whole:
            x = (x @ w.t()).tanh()
        x.square().sum().backward()
    off = max(
        float((p.grad - whole[schedule.stage_of(mesh.pp.rank, c)].grad).abs().max())
        for c, p in mine.items()
    )
    freed = len(alive) == 0
    with torch.no_grad():
        pipeline.execute(
            forward_only(schedule),
            mesh,
            StepWork(forward, lambda: torch.empty(ROWS, SIZE, dtype=torch.float64)),
        )
    return {
        "in order": tuple(done) == schedule.actions[mesh.pp.rank],
        "off": off,
        "most": most,
        "freed": freed,
        "reduced": reduction.calls == expected_calls(schedule, mesh.pp.rank),
        "rank": mesh.pp.rank,
    }


ORDERS = {2: (0,), 4: (0, 1)}
"""World size -> seeds of orders that are swapped at random."""


def in_world() -> dict:
    out, mesh = {}, meshes.build_mesh(1, 1, torch.device("cpu"), pp=dist.get_world_size())
    for name in SCHEDULES:
        schedule = make_schedule(name, mesh.pp.size, MICROS, CHUNKS.get(name, 1))
        for kind, order in (
            (name, schedule),
            *((f"{name}, order {seed}", shuffled(schedule, seed)) for seed in ORDERS[mesh.pp.size]),
        ):
            everyone = [None] * mesh.pp.size
            dist.all_gather_object(
                everyone, (run(order, mesh), simulate(order).peak[mesh.pp.rank] * order.chunks)
            )
            out[kind] = everyone
    mixed = joined(make_schedule("zero-bubble", mesh.pp.size, MICROS))
    everyone = [None] * mesh.pp.size
    dist.all_gather_object(everyone, run(mixed, mesh))
    return out | {"mixed": everyone}


@cache
def results(world: int) -> dict:
    return run_spawned(world, in_world)


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_is_the_list(world, name):
    for got, _ in results(world)[name]:
        assert got["in order"] and got["off"] < 1e-12 and got["freed"], got


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_reduced_with_the_last_backward(world, name):
    """Of each chunk and of all, in whatever valid order the list is."""
    for kind in (name, *(f"{name}, order {seed}" for seed in ORDERS[world])):
        assert all(got["reduced"] for got, _ in results(world)[kind]), kind


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_valid_order_ends_and_is_right(world, name):
    """Swapped at random: ranks send in orders that blocking sends, or one channel for both
    directions, would not survive.
    """
    for seed in ORDERS[world]:
        for got, _ in results(world)[f"{name}, order {seed}"]:
            assert got["in order"] and got["off"] < 1e-12, got


@pytest.mark.parametrize("world", (2, 4))
def test_a_list_may_split_some_backwards_and_not_others(world):
    for got in results(world)["mixed"]:
        assert got["in order"] and got["off"] < 1e-12 and got["reduced"], got


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_activations_are_freed_as_the_schedule_says(world, name):
    """The most that are alive after any action are those that the simulator counts. (Where backward
    is split, the graph goes with I, and only what the products need waits for W.)
    """
    for got, peak in results(world)[name]:
        assert got["most"] == peak, (got, peak)


def test_each_direction_has_a_channel_of_its_own():
    """Of rank 1 of 3: over NCCL, what is sent to one rank and received from it on one channel would
    wait for each other.
    """
    axes = {name: Axis(name, 3, 1) for name in ("pp", "up", "down")}
    mesh = replace(meshes.SINGLE, **axes)
    ways = [(1, 2), (0, 1), (1, 0), (2, 1)]
    assert [pipeline.channel_axis(mesh, *way).name for way in ways] == ["up", "up", "down", "down"]


def test_a_swapped_message_is_seen():
    """Negative control: two microbatches' activations are taken for each other."""
    assert results(2)["1f1b"][0][0]["off"] < 1e-12
    found = run_spawned(2, swapped)
    assert max(found) > 1e-3


def swapped() -> list[float]:
    sent = pipeline.messages_sent
    pipeline.messages_sent = lambda s, sender, to: (
        (messages := sent(s, sender, to))[1::-1] + messages[2:] if to else sent(s, sender, to)
    )
    mesh, everyone = meshes.build_mesh(1, 1, torch.device("cpu"), pp=2), [None, None]
    dist.all_gather_object(everyone, run(make_schedule("1f1b", 2, MICROS), mesh)["off"])
    return everyone
