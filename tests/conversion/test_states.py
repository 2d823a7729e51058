"""What delayed scaling of Transformer Engine knows goes through `dolmen convert` and begins a run:
states put into checkpoints that are laid by hand, and read back under our names.
"""

import io
import itertools
import json
import pickle
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import transformers
from laid import LOCAL, TE, How, lay
from test_megatron_read import LLAMA, VOCABULARY, built, parts

from dolmen.conversion import convert
from dolmen.conversion.config import ConvertConfig
from dolmen.conversion.megatron import scaling
from dolmen.conversion.source import open_source
from dolmen.conversion.weights import Scaling
from dolmen.core.config import from_dict
from dolmen.core.mesh import SINGLE
from dolmen.data.batch import Batch
from dolmen.training.checks.run import validate
from dolmen.training.config import RunConfig
from dolmen.training.initialize import make_state
from dolmen.training.resolve import resolve
from dolmen.training.step import optimizer_step

STEPS = 5
OURS = {
    "self_attention.linear_qkv": ("attn.q", "attn.k", "attn.v"),
    "self_attention.linear_proj": ("attn.o",),
    "mlp.linear_fc1": ("mlp.gate", "mlp.up"),
    "mlp.linear_fc2": ("mlp.down",),
    "mlp.experts.linear_fc1": ("mlp.experts.gate", "mlp.experts.up"),
    "mlp.experts.linear_fc2": ("mlp.experts.down",),
}
MODELS = {
    "llama": transformers.LlamaConfig(**LLAMA),
    "mixtral": transformers.MixtralConfig(**LLAMA, num_local_experts=4),
}


def known(layer: int, module: str, expert: int = 0) -> Scaling:
    """What the state of a product has."""
    draw = torch.Generator().manual_seed(1000 * layer + 10 * [*OURS].index(module) + expert)
    return Scaling(torch.rand(STEPS, 3, generator=draw), torch.rand(3, generator=draw) + 0.5)


def theirs(products: list[Scaling]) -> dict:
    """As get_extra_state lays them, by columns: what we never round has numbers too."""
    nothing = torch.full((STEPS, 1), 9.0)
    return {
        "scale_fwd": torch.cat([torch.cat([p.scale[:2], torch.ones(1)]) for p in products]),
        "amax_history_fwd": torch.cat(
            [torch.cat([p.history[:, :2], nothing], 1) for p in products], 1
        ),
        "scale_bwd": torch.cat([torch.cat([p.scale[2:], torch.ones(1)]) for p in products]),
        "amax_history_bwd": torch.cat(
            [torch.cat([p.history[:, 2:], nothing], 1) for p in products], 1
        ),
        "extra_fp8_variables": {"num_gemms": len(products)},
    }


def since_1_12(value) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def until_1_11(value) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


def fill(folder: Path, how: How, encode) -> None:
    """A state in each place for one, in the files of all ranks."""
    for file in folder.glob("*/mp_rank_*/model_optim_rng.pt"):
        values = torch.load(file, weights_only=False)
        _, _, _, *rest = file.parent.name.split("_")
        stage = int(rest[0]) if how.pp > 1 else 0
        ep = int(rest[-1]) if how.ep > 1 else 0
        held = values["model"]
        number = 4 // how.ep
        for name in [name for name in held if name.endswith("_extra_state")]:
            layer, module = re.fullmatch(
                r"decoder\.layers\.(\d+)\.(.+)\._extra_state", name
            ).groups()
            layer = int(layer) + sum(how.stages[0][:stage])
            if match := re.fullmatch(r"(.+)\.local_experts\.(\d+)\.(.+)", module):
                expert = int(match[2]) + ep * number
                products = [known(layer, f"{match[1]}.{match[3]}", expert)]
            elif ".experts." in module:
                products = [known(layer, module, ep * number + i) for i in range(number)]
            else:
                products = [known(layer, module)]
            held[name] = encode(theirs(products))
        torch.save(values, file)


def expected(model: str) -> dict[str, Scaling]:
    """By our names."""
    found = {}
    for layer in range(4):
        for module, ours in OURS.items():
            if module.startswith("mlp.experts") != (model == "mixtral") and "mlp" in module:
                continue
            each = [known(layer, module, e) for e in range(4)]
            one = each[0]
            if "experts" in module:
                one = Scaling(
                    torch.stack([e.history for e in each], 1), torch.stack([e.scale for e in each])
                )
            found |= {f"layers.{layer}.{name}.weight": one for name in ours}
    return found


def equal(got, want) -> None:
    assert got.keys() == want.keys()
    for name, one in want.items():
        assert torch.equal(got[name].history, one.history), name
        assert torch.equal(got[name].scale, one.scale), name


CASES = {
    "llama, tp 2, pp 2": ("llama", How(TE, 3.0, 2, [[2, 2]]), since_1_12),
    "grouped experts, ep 2": ("mixtral", How(TE, 3.0, 2, [[4]], ep=2), until_1_11),
    "experts one by one, ep 2": ("mixtral", How(LOCAL, 3.0, 1, [[1, 3]], ep=2), since_1_12),
}


@pytest.mark.parametrize("case", CASES)
def test_states_are_those_of_our_weights(case, tmp_path):
    """And go on to both formats that have them, with the weights."""
    model, how, encode = CASES[case]
    lay(tmp_path / "laid", parts(built(MODELS[model])), how)
    fill(tmp_path / "laid", how, encode)
    want = expected(model)
    equal(open_source(tmp_path / "laid", vocab_size=VOCABULARY).scaling, want)
    ranks = dict(tp=2, pp=2, ep=4 if model == "mixtral" else 1)
    source = tmp_path / "laid"
    for to, options in (("torch-dist", {}), ("megatron-core", ranks)):
        config = ConvertConfig(
            str(source), str(tmp_path / to), to, vocab_size=VOCABULARY, **options
        )
        assert convert.convert(config).endswith(f"; fp8 scales of {len(want)} weights compared too")
        source = tmp_path / to
        equal(open_source(source).scaling, want)
    for file in source.rglob("model_optim_rng.pt"):  # the head, which is not fp8, has an empty one
        empty = "output_layer._extra_state" in torch.load(file, weights_only=False)["model"]
        assert empty == (file.parent.name.split("_")[3] == "001"), file  # of the last stage


@pytest.fixture(scope="module")
def laid(tmp_path_factory):
    """Checkpoint of a Llama with its states, and its config.json."""
    folder, how = tmp_path_factory.mktemp("states") / "laid", How(TE, 3.0, 1, [[4]])
    model = built(MODELS["llama"])
    lay(folder, parts(model), how)
    fill(folder, how, since_1_12)
    (folder / "config.json").write_text(model.config.to_json_string())
    return folder


def test_the_size_of_a_state_may_differ_each_time(laid, tmp_path, monkeypatch):
    """A pickle of tensors has their addresses in decimal, with more or fewer digits."""
    encode, sizes = scaling.write_extra_state, itertools.cycle(range(1, 8))

    def longer(products: Iterable[Scaling]) -> bytes:
        values = pickle.loads(encode(products))
        values["extra_fp8_variables"]["note"] = "0" * next(sizes)
        return pickle.dumps(values, protocol=4)

    monkeypatch.setattr(scaling, "write_extra_state", longer)
    config = ConvertConfig(str(laid), str(tmp_path / "to"), "megatron-core")
    assert "fp8 scales of" in convert.convert(config)


def run_of(folder: Path, *, history=STEPS) -> RunConfig:
    values = {
        "init": str(folder),
        "model": json.loads((folder / "config.json").read_text()),
        "layout": {"dp": 1},
        "train": {
            "precision": "fp8-delayed",
            "fp8": {"amax_history": history},
            "global_batch_size": 2,
        },
    }
    return from_dict(RunConfig, values)


@pytest.mark.parametrize("history", (3, STEPS, 8))
def test_a_run_begins_with_them(laid, history):
    """The latest steps of a history that is longer, and none is made up in one that is shorter."""
    state = make_state(resolve(run_of(laid, history=history), 1), SINGLE, 10)
    for name, one in expected("llama").items():
        mine = state.model.delayed_scaling()[name]
        assert mine.initialized and torch.equal(mine.scale, one.scale)
        kept = min(history, STEPS) - 1
        assert torch.equal(mine.history[history - kept :], one.history[STEPS - kept :])
        assert not mine.history[: history - kept].any()
    windows = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = Batch.from_windows(windows.numpy())
    with_scales = optimizer_step(state, batch, SINGLE).loss
    state = make_state(resolve(run_of(laid, history=history), 1), SINGLE, 10)
    for one in state.model.delayed_scaling().values():
        one.forget()
    assert optimizer_step(state, batch, SINGLE).loss != with_scales


def test_what_has_no_place_for_them_says_so(laid, tmp_path):
    for to, options in (("hf", {}), ("megatron", {}), ("megatron-core", {"spec": "local"})):
        config = ConvertConfig(str(laid), str(tmp_path / f"{to}{len(options)}"), to, **options)
        with pytest.warns(UserWarning, match="scales of delayed scaling are not converted: --to"):
            convert.convert(config)


class Evil:
    """What a pickle may name, to be called."""

    def __reduce__(self):
        return print, ("called",)


def wrong(name: str):
    state = theirs([known(0, "mlp.linear_fc2")])
    return {
        "a call": since_1_12({**state, "recipe": Evil()}),
        "cut": since_1_12(state)[:-40],
        "an archive, cut": io.BytesIO(until_1_11(state).getvalue()[:-40]),
        "a scale of 0": since_1_12({**state, "scale_fwd": torch.zeros(3)}),
        "a scale that is none": since_1_12({**state, "scale_bwd": torch.full((2,), torch.nan)}),
        "two products": since_1_12(theirs([known(0, "mlp.linear_fc2")] * 2)),
        "numbers": torch.ones(4),
        "a list": [1, 2],
    }[name]


@pytest.mark.parametrize(
    "name, said",
    [
        ("a call", "print, which is not allowed"),
        ("cut", "has a state that cannot be read"),
        ("an archive, cut", "has a state that cannot be read"),
        ("a scale of 0", "scale_fwd is not positive and finite"),
        ("a scale that is none", "scale_bwd is not positive and finite"),
        ("two products", "holds states of 2 products"),
        ("numbers", "has an _extra_state that is not bytes"),
        ("a list", "has an _extra_state that is not bytes"),
    ],
)
def test_what_is_no_state_is_refused(laid, tmp_path, name, said, capsys):
    """By a run, before it begins, and by what would carry it over."""
    folder = tmp_path / "laid"
    (rank,) = laid.glob("*/mp_rank_00/model_optim_rng.pt")
    copy = folder / rank.relative_to(laid)
    copy.parent.mkdir(parents=True)
    for file in ("latest_checkpointed_iteration.txt", "config.json"):
        (folder / file).write_bytes((laid / file).read_bytes())
    values = torch.load(rank, weights_only=False)
    values["model"]["decoder.layers.0.mlp.linear_fc2._extra_state"] = wrong(name)
    torch.save(values, copy)
    with pytest.raises(ValueError, match=re.escape(said)):
        validate(resolve(run_of(folder), 1))
    with pytest.raises(ValueError, match=re.escape(said)):
        convert.convert(ConvertConfig(str(folder), str(tmp_path / "to"), "torch-dist"))
    assert not (tmp_path / "to").exists() and "called" not in capsys.readouterr().out
