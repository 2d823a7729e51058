"""Adapters against their oracle, in float64: losses, norms, A, B and their moments of five updates,
and the exported model, in which they are merged.

A begins by a formula, which dolmen is given in place of its own random values; those have a test of
their own (tests/model/test_adapters.py).
"""

import zlib
from unittest import mock

import adapter
import freeze
import low_rank
import numpy as np
import pytest
import torch
import trainer
from low_rank import Adapters
from rows import DATA, named
from safetensors.torch import load_file

import dolmen
from dolmen.checkpoint.reader import Checkpoint, locate
from dolmen.conversion import hf
from dolmen.core import state
from dolmen.families import weight_map

DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
ROWS = {
    "llama": Adapters(3, 12.0, DENSE),
    # latents, the shared expert, and experts, each with its own
    "deepseek-v3": Adapters(2, 5.0, LATENT + ("gate_proj", "down_proj")),
}
ROUNDING = 1e-12  # of fp64, in units of the largest element: less than 1e-13 was measured


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> adapter.Material:
    return adapter.material(tmp_path_factory.mktemp("low-rank"))


def formula(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    noise = np.random.RandomState(zlib.crc32(name.encode())).uniform(-0.2, 0.2, shape)
    return torch.from_numpy(noise)


@pytest.mark.parametrize("name", ROWS)
def test_adapters(name, made, tmp_path):
    row, adapters = named(name), ROWS[name]
    dumped, weights = freeze.load(row.data), trainer.initial(row.job)
    begin = {
        stored: formula(stored, (adapters.rank, weights[stored].shape[1]))
        for stored in adapters.of(weights)
    }
    want = low_rank.train(row.job, adapters, weights, begin, freeze.batches(row, dumped))

    (tmp_path / "init").mkdir()
    trainer.write(tmp_path / "init", row.job, weights)
    (tmp_path / "run.yaml").write_text("name: oracle\n")
    model = hf.read_config(tmp_path / "init")
    pieces: dict[str, dict[int | None, str]] = {}
    for entry in weight_map(model).entries.values():
        pieces.setdefault(entry.ours[0], {})[entry.piece] = entry.hf

    def given(p, ours, seed, bound):
        of = pieces[ours.replace("lora_A", "weight")]
        parts = [begin[stored] for _, stored in sorted(of.items(), key=str)]
        state.local_view(p).copy_(torch.stack(parts) if None not in of else parts[0])

    options = adapter.options(row.job, DATA[row.data], made, "float64", row.train, None)
    chosen = {"rank": adapters.rank, "alpha": adapters.alpha, "targets": adapters.targets}
    out = tmp_path / "out"
    with adapter.patched(DATA[row.data]), mock.patch.object(state, "fill_uniform", given):
        dolmen.train(
            tmp_path / "run.yaml", init=tmp_path / "init", out=out, adapter=chosen, **options
        )

    losses, norms = adapter.series(out, "loss"), adapter.series(out, "grad_norm")
    assert losses == pytest.approx(want.losses, rel=ROUNDING)
    assert norms == pytest.approx(want.norms, rel=ROUNDING)
    saved = Checkpoint(locate(out))
    for kind, true in (("exp_avg", want.first), ("exp_avg_sq", want.second)):
        for stored in begin:
            entry = weight_map(model).entries[stored]
            for letter in "AB":
                ours = entry.ours[0].replace("weight", f"lora_{letter}")
                whole = saved.read(f"{kind}/{ours}")
                got = whole if entry.piece is None else whole[entry.piece]
                off = (got - true[f"{stored}.{letter}"]).abs().max()
                assert off <= ROUNDING * true[f"{stored}.{letter}"].abs().max(), (kind, ours)
    trained = {n for n in saved.specs if not n.startswith("model/")}
    assert all("lora_" in n for n in trained)
    exported = load_file(out / "hf" / "model.safetensors")
    for stored, tensor in exported.items():
        # rounded to the dtype of the model it came from
        assert torch.equal(tensor, weights[stored]) == (stored not in begin), stored
        off = (tensor.double() - want.weights[stored]).abs().max()
        assert off <= 2**-24 * want.weights[stored].abs().max() + 1e-12, stored
