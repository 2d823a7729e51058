"""Bounds are where they are said to be: each accepts what is just at it and refuses the next. Of a
bound that is large, a smaller one is tested in its place.
"""

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from dolmen.checkpoint import seal
from dolmen.cli import planning
from dolmen.conversion.megatron import dist
from dolmen.core import config, consensus
from dolmen.core.environment import Launch
from dolmen.files import (
    gate,
    sentencepiece_model,
    storage,
    tokenizer_files,
    torch_files,
    yaml_values,
)
from dolmen.files.sentencepiece_model import VocabularyPiece
from dolmen.parallel.simulation import Cost, make_schedule, simulate
from dolmen.planning import schedule_search
from dolmen.planning.schedule_problem import Costs
from dolmen.rl import function_worker, rewards
from dolmen.serving import adapters
from dolmen.training.state import SpikePolicy


class Bound(NamedTuple):
    """`take(bound)` passes, and `take(beyond)` raises an error that has the text `error`."""

    take: Callable[[Any], Any]
    bound: Any
    beyond: Any
    error: str
    module: Any = None
    name: str = ""
    small: Any = None
    """Value of `module`.`name` in the test, where its own is large."""


def pieces(number: int, length: int = 3) -> Any:
    texts = ["<unk>", *(f"{i:0{length}d}" for i in range(number - 1))]
    kinds = [sentencepiece_model.UNKNOWN, *[sentencepiece_model.NORMAL] * (number - 1)]
    rows = [VocabularyPiece(text, 0.0, kind) for text, kind in zip(texts, kinds, strict=True)]
    content = b"".join(map(sentencepiece_model._write_piece, rows))
    return sentencepiece_model.parse(content, "x")


def archive(folder: Path, size: int) -> Any:
    """A file of torch.save whose pickle has as many bytes."""
    torch.save({"": 0}, folder / "small.pt")
    with zipfile.ZipFile(folder / "small.pt") as file:
        (name,) = [name for name in file.namelist() if name.endswith("data.pkl")]
        least = file.getinfo(name).file_size
    torch.save({"x" * (size - least): 0}, folder / "file.pt")
    with zipfile.ZipFile(folder / "file.pt") as file:
        assert file.getinfo(name.replace("small", "file")).file_size == size
    with open(folder / "file.pt", "rb") as file:
        return torch_files.read_archive(file)


def newer_seal(folder: Path, number: int) -> None:
    (folder / seal.STATE).write_text(json.dumps({"format": number}))
    seal._refuse_newer(folder, f"dolmen checkpoint {number}, ".encode())


def schedule_options(microbatches: int) -> Any:
    sizes = dict(schedule="gpipe", pp=2, microbatches=microbatches, virtual_stages=1, memory=None)
    return SimpleNamespace(**sizes)


def picture(folder: Path, microbatches: int) -> None:
    schedule = make_schedule("gpipe", 2, microbatches, 1)
    planning.draw_picture(schedule, simulate(schedule, Cost()), folder / "a.svg")


def search(microbatches: int, memory: float = 9.0) -> Any:
    costs = Costs("times", {"forward": 1.0, "backward": 2.0})
    return schedule_search.shortest(2, microbatches, 1, costs, memory, nodes=0)


def launched(**variables: Any) -> Any:
    """A process of torchrun, or of SLURM where a variable is SLURM's."""
    world = {"SLURM_NTASKS": 7, "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0}
    world |= {"SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_TASKS_PER_NODE": "4,3"}
    if not any(name in world for name in variables):
        world = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "a", "MASTER_PORT": 1}
    return Launch.read({name: str(value) for name, value in (world | variables).items()})


BOUNDS: dict[str, Callable[[Path], Bound]] = {
    "pieces of a vocabulary": lambda _: Bound(
        pieces, 5, 6, "6 pieces", sentencepiece_model, "LARGEST_VOCABULARY", 5
    ),
    "bytes of a piece": lambda _: Bound(
        lambda length: pieces(2, length),
        sentencepiece_model.LONGEST,
        sentencepiece_model.LONGEST + 1,
        "a piece has",
    ),
    "growth of a text": lambda folder: Bound(
        lambda times: tokenizer_files.check_times(folder, "decoder", times), 64, 65, "65 times"
    ),
    "depth of a name": lambda _: Bound(
        lambda depth: storage._check_name("s3://a", "/".join("x" * depth)),
        storage.DEEPEST,
        storage.DEEPEST + 1,
        "has a name that no local file can have",
    ),
    "bytes of a pickled state": lambda folder: Bound(
        lambda size: torch_files.load_bytes(pickle.dumps(None, 2).ljust(size, b"."), folder),
        10,
        11,
        "a state of 11 bytes",
        torch_files,
        "MOST_BYTES",
        10,
    ),
    "bytes of an archive's pickle": lambda folder: Bound(
        lambda size: archive(folder, size), 90, 91, "more than 90 bytes", torch_files, "MOST", 90
    ),
    "values of YAML": lambda folder: Bound(
        lambda number: yaml_values.parse_yaml(f"[{', '.join('1' * number)}]", 9),
        6,
        7,
        "more than 7 values",
        yaml_values,
        "MOST",
        7,
    ),
    "format of a checkpoint": lambda folder: Bound(
        lambda number: newer_seal(folder, number),
        seal.FORMAT,
        seal.FORMAT + 1,
        "was written by a newer dolmen",
    ),
    "an integer of YAML": lambda _: Bound(
        lambda value: config.refuse_unreadable("x", [value]), 2**63 - 1, 2**63, "at most"
    ),
    "a negative integer of YAML": lambda _: Bound(
        lambda value: config.refuse_unreadable("x", value), 1 - 2**63, -(2**63), "at most"
    ),
    "weight of a reward": lambda _: Bound(
        lambda x: rewards.parse_rewards([f"{x}:stub"]), 10**15, 10**15 + 1, "at most 1e"
    ),
    "characters of an adapter's name": lambda _: Bound(
        lambda length: adapters.check_adapters([("x" * length, "folder")]),
        adapters.LONGEST,
        adapters.LONGEST + 1,
        "characters that can be printed",
    ),
    "forwards of a schedule": lambda _: Bound(
        lambda micros: planning.build_schedule(schedule_options(micros)),
        4,
        5,
        "10 forwards are too many",
        planning,
        "MAX_FORWARDS",
        8,
    ),
    "actions of a picture": lambda folder: Bound(
        lambda micros: picture(folder, micros), 2, 3, "12 actions", planning, "MAX_BOXES", 8
    ),
    "actions of a search": lambda _: Bound(
        search, 2, 3, "18 actions", schedule_search, "MOST_ACTIONS", 12
    ),
    "updates of an optimizer": lambda folder: Bound(
        lambda step: dist._number(step, folder), 2**40 - 1, 2**40, "which is not a whole number"
    ),
    "least updates of an optimizer": lambda folder: Bound(
        lambda step: dist._number(step, folder), 0, -1, "which is not a whole number"
    ),
    "a port": lambda _: Bound(
        lambda port: launched(MASTER_PORT=port), 65535, 65536, "must be from 0 to 65535"
    ),
    "a rank": lambda _: Bound(
        lambda rank: launched(RANK=rank), 1, 2, "must be from 0 to 1, as WORLD_SIZE is 2"
    ),
    "a rank of SLURM": lambda _: Bound(
        lambda rank: launched(SLURM_PROCID=rank), 6, 7, "from 0 to 6, as SLURM_NTASKS is 7"
    ),
    "a machine of SLURM": lambda _: Bound(
        lambda node: launched(SLURM_NODEID=node), 1, 2, "from 0 to 1, as SLURM_STEP_TASKS_PER"
    ),
    "a task of a machine": lambda _: Bound(
        lambda task: launched(SLURM_NODEID=1, SLURM_LOCALID=task), 2, 3, "must be from 0 to 2"
    ),
    "memory of a search": lambda _: Bound(
        lambda memory: search(2, memory), 1.0, 0.99, "must be at least 1"
    ),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_value_just_at_its_bound_is_accepted(name, tmp_path, monkeypatch):
    bound = BOUNDS[name](tmp_path)
    if bound.module is not None:
        monkeypatch.setattr(bound.module, bound.name, bound.small)
    bound.take(bound.bound)
    with pytest.raises((ValueError, gate.Refused, storage.StorageError), match=bound.error):
        bound.take(bound.beyond)


def test_rewards_are_below_their_bound():
    def reward(value: object) -> dict:
        return function_worker.compute_reward(
            lambda *_: value, {"prompt": "", "completion": "", "row": {}}
        )

    below = 1e15 - 1
    assert reward(below) == {"reward": below} and reward(-below) == {"reward": -below}
    assert [reward(value) for value in (1e15, -1e15)] == [
        {"failed": "it gave 1000000000000000.0"},
        {"failed": "it gave -1000000000000000.0"},
    ]


def test_six_differences_of_a_host_are_listed():
    names = [f"fact {i}" for i in range(7)]
    first, other = dict.fromkeys(names, 1), dict.fromkeys(names[1:], 2)
    six = consensus._differences(names[:6], first, other)
    assert six.startswith("fact 0 absent, here 1; fact 1 2, here 1; ") and "more" not in six
    assert consensus._differences(names, first, other) == f"{six}; and 1 more"


def test_a_spike_is_over_a_multiple_of_the_median_of_sixteen_norms():
    for before, allowed in ((15, True), (16, False)):
        policy = SpikePolicy(3.0)
        assert all(policy.allow(1.0) for _ in range(before))
        assert policy.allow(3.1) is allowed
    policy = SpikePolicy(3.0)
    assert all(policy.allow(1.0) for _ in range(16)) and policy.allow(3.0)
    assert not policy.allow(float("inf")) and len(policy.norms) == 17
