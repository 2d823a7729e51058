"""The state of AdamW in a checkpoint of torch_dist, laid by hand: it is read by our names, comes
along to another one to the bit, and what cannot come is told.
"""

import json
from dataclasses import replace

import pytest
import tinyrun
import torch
import transformers
from rich.console import Console
from test_megatron_read import GPT2, LLAMA, VOCABULARY, built
from test_torch_dist import described, lay, parts, whole

from dolmen.checkpoint.reader import Checkpoint
from dolmen.conversion import convert
from dolmen.conversion.config import ConvertConfig
from dolmen.conversion.megatron import dist_export
from dolmen.conversion.source import cast_source, open_source
from dolmen.conversion.weights import MOMENTS
from dolmen.core.config import from_dict
from dolmen.core.mesh import SINGLE
from dolmen.data.batch import Batch
from dolmen.families.adapters import AdapterConfig
from dolmen.optim.config import OptimizerConfig
from dolmen.training.checks.model import check_moments
from dolmen.training.config import RunConfig
from dolmen.training.initialize import make_state
from dolmen.training.resolve import resolve
from dolmen.training.run import run_training
from dolmen.training.step import optimizer_step

material, one_thread = tinyrun.material, tinyrun.one_thread

STATE = "optimizer.state."
GROUPS = {"optimizer": {"optimizer": {"param_groups": [{"lr": 1e-3, "step": 7}] * 2}}}
ONCE = {
    "optimizer": {
        0: {"optimizer": {"state": {"common_step": torch.tensor(7.0)}, "param_groups": [{}]}},
        1: {"optimizer": {"state": {"common_step": 7}, "param_groups": []}},
    }
}
NORM = "decoder.final_layernorm.weight"


def random(config, seed, name=None, squared=False):
    """A model of random numbers, its norms too, or of their squares; where `name` is given saved
    there.
    """
    model = built(config)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(generator=draw)
            if squared:
                p.square_()
    if name is not None:
        model.save_pretrained(name)
    return model


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def laid(request, tmp_path_factory):
    """Weights in bfloat16 of masters in fp32, and both moments: as parts, and as directories of
    transformers, whose names and shapes are the model's.
    """
    where = tmp_path_factory.mktemp("state")
    made = {}
    for seed, kind in enumerate(("param", *MOMENTS)):
        config = (
            transformers.LlamaConfig(**LLAMA)
            if request.param == "llama"
            else transformers.GPT2Config(**GPT2)
        )
        made[kind] = parts(random(config, seed, where / kind, kind == "exp_avg_sq"))
    half = random(type(config)(**config.to_dict()), 0).to(torch.bfloat16)
    made["weights"] = parts(half)
    return where, made


def laid_in(folder, made, said=GROUPS, chained=False, masters="param", **how):
    """The moments of what chained optimizers have lie behind their number."""
    first, second = ("chained_0.", "chained_1.") if chained else ("", "")
    kinds = {
        f"{first}{STATE}{masters}.": made["param"],
        f"{second}{STATE}exp_avg.": made["exp_avg"],
        f"{first}{STATE}exp_avg_sq.": made["exp_avg_sq"],
    }
    return lay(folder, made["weights"], state=(said, kinds), **how)


def opened(folder):
    return open_source(folder, vocab_size=VOCABULARY)


def same(tensors, folder, dtype=torch.float32):
    """Whether they are the weights of a directory of transformers, to the bit."""
    expected = {name: value.to(dtype) for name, value in open_source(folder).stream()}
    streamed = dict(tensors.stream())
    assert streamed.keys() == expected.keys() == tensors.specs.keys()
    for name, value in expected.items():
        assert tensors.specs[name].dtype == dtype
        assert torch.equal(streamed[name], value), name
        assert torch.equal(tensors.read(name), value), name
    return True


CASES = {
    "stacked, tp 2": {},
    "a layer each, older names, chained": dict(
        stacked=False, said=ONCE, chained=True, masters="fp32_param"
    ),
    "the common state an entry": dict(said=ONCE, entry=True, tp=1),
}


@pytest.mark.parametrize("case", CASES)
def test_moments_and_masters_have_our_names(case, laid, tmp_path):
    where, made = laid
    source = opened(laid_in(tmp_path, made, **CASES[case]))
    assert source.moments is not None and source.moments.step == 7
    for kind in MOMENTS:
        assert same(source.moments.kinds[kind], where / kind)
    assert same(source, where / "param", torch.bfloat16)
    assert same(source.precise, where / "param")
    assert cast_source(source, torch.bfloat16) is source
    assert same(cast_source(source, torch.float32), where / "param")


def test_a_moment_of_a_norm_that_is_stored_less_one(laid, tmp_path):
    """Its master is shifted as the weight is, its moments are not."""
    where, made = laid
    args = dict(made["weights"].args, apply_layernorm_1p=True)
    made = {**made, "weights": type(made["weights"])(**{**vars(made["weights"]), "args": args})}
    source = opened(laid_in(tmp_path, made))
    for kind in MOMENTS:
        assert same(source.moments.kinds[kind], where / kind)
    expected = open_source(where / "param")
    norms = [name for name, param in source.spec.params.items() if param.role == "norm"]
    name = next(name for name in norms if name.endswith("norm.weight"))
    assert torch.equal(source.precise.read(name), expected.read(name) + 1)


def run(source, to, format, **options):
    return convert.convert(
        ConvertConfig(str(source), str(to), format, vocab_size=VOCABULARY, **options)
    )


def test_they_come_along_to_the_bit(laid, tmp_path, recwarn):
    """Keys, shapes and numbers, as torch reads them; behind the vocabulary moments are zeros."""
    _, made = laid
    folder = laid_in(tmp_path / "a", made, tp=1)
    reported = run(folder, tmp_path / "b", "torch-dist")
    assert reported.endswith(
        "logits equal; AdamW moments after 7 updates and fp32 masters compared too"
    )
    assert not [one for one in recwarn if "not converted" in str(one.message)]
    ours = whole(tmp_path / "b" / "iter_0000012")
    theirs = whole(folder / "iter_0000012")
    assert ours.keys() == theirs.keys() and f"{STATE}exp_avg.{NORM}" in ours
    for key, tensor in theirs.items():
        table = "word_embeddings" in key or "output_layer" in key
        rows = VOCABULARY if table else None
        assert ours[key].dtype == tensor.dtype and ours[key].shape == tensor.shape
        assert torch.equal(ours[key][:rows], tensor[:rows]), key
        if table and "exp_avg" in key:
            assert len(ours[key]) > rows and not ours[key][rows:].any()
    written = opened(tmp_path / "b")
    assert written.iteration == 12 and written.moments.step == 7
    common = torch.load(tmp_path / "b" / "iter_0000012" / "common.pt", weights_only=False)
    assert common["iteration"] == 12 and common["args"].iteration == 12
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert common["optimizer"]["optimizer"]["param_groups"][0]["step"] == 7


@pytest.mark.parametrize("format", ["hf", "megatron-core"])
def test_other_formats_say_that_they_stay_behind(format, laid, tmp_path):
    """In float32 the masters are what is written."""
    where, made = laid
    folder = laid_in(tmp_path / "a", made)
    with pytest.warns(UserWarning, match=f"state is not converted: --to {format} cannot"):
        run(folder, tmp_path / "b", format, dtype="float32")
    assert same(open_source(tmp_path / "b"), where / "param")


def test_what_is_written_otherwise_is_seen(laid, tmp_path, monkeypatch):
    _, made = laid
    folder = laid_in(tmp_path / "a", made)
    honest = dist_export.StackPlace.write

    def write(self, files, prefix, tensor):
        honest(self, files, prefix, tensor + 1 if "exp_avg_sq" in prefix else tensor)

    monkeypatch.setattr(dist_export.StackPlace, "write", write)
    with pytest.raises(convert.Unlike, match="exp_avg_sq of .* has changed in"):
        run(folder, tmp_path / "b", "torch-dist")

    def half(self, files, prefix, tensor):
        honest(self, files, prefix, tensor.to(torch.bfloat16) if prefix else tensor)

    monkeypatch.setattr(dist_export.StackPlace, "write", half)
    with pytest.raises(convert.Unlike, match="exp_avg of .* is torch.bfloat16"):
        run(folder, tmp_path / "c", "torch-dist")
    assert not (tmp_path / "b").exists() and not (tmp_path / "c").exists()


def renamed(old, new):
    def change(metadata):
        metadata.state_dict_metadata = {
            key.replace(old, new): one for key, one in metadata.state_dict_metadata.items()
        }
        for index in list(metadata.storage_data):
            if old in index.fqn:
                place = metadata.storage_data.pop(index)
                moved = type(index)(index.fqn.replace(old, new), index.offset, index.index)
                metadata.storage_data[moved] = place

    return described(change)


def step(*steps):
    return {"optimizer": {"optimizer": {"param_groups": [{"step": one} for one in steps]}}}


BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.exp_avg."
REFUSALS = {
    "buckets": (
        GROUPS,
        renamed(f"{STATE}exp_avg.{NORM}", f"{BUCKET}{NORM}"),
        "across parameter boundaries",
    ),
    "one kind": (GROUPS, renamed(f"{STATE}exp_avg.", "rng_state."), "has no exp_avg of its opt"),
    "a hole": (GROUPS, renamed(f"{STATE}exp_avg.{NORM}", "rng_state.x"), "1 tensor is missing"),
    "of nothing": (GROUPS, renamed(f"{STATE}exp_avg.{NORM}", f"{STATE}exp_avg.x"), "x is not ther"),
    "steps": (step(7, 8), None, r"parameters have different update counts: \[7, 8\]"),
    "no count": (step(7.5), None, "the optimizer's step is 7.5, which is not a whole number"),
    "text": (step("7"), None, "the optimizer's step is '7', which is not a whole number"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_read_is_told_and_weights_are_read(case, laid, tmp_path):
    where, made = laid
    said, damage, why = REFUSALS[case]
    folder = laid_in(tmp_path, made, said)
    if damage is not None:
        damage(folder / "iter_0000012")
    source = opened(folder)
    assert same(source, where / "param", torch.bfloat16)
    with pytest.raises((ValueError, KeyError), match=why) as error:
        _ = source.moments
    assert "\n" not in str(error.value)
    with pytest.warns(UserWarning, match="the optimizer state is not converted: .*" + why):
        assert convert._optimizer_state(source, "torch-dist") is None


def test_updates_are_iterations_where_nothing_else_is_said(laid, tmp_path):
    _, made = laid
    assert opened(laid_in(tmp_path, made, {})).moments.step == 12


def test_a_source_of_weights_alone_says_so(laid):
    where, _ = laid
    source = open_source(where / "param")
    assert source.moments is None and source.precise is source


def initialized(folder, **sections):
    """A run that begins with a folder, checked but for its data."""
    model = opened(folder).model
    (folder / "config.json").write_text(json.dumps(model.config))
    values = {
        "init": str(folder),
        "model": model.config,
        "layout": {"dp": 1},
        "optimizer": {"from_init": True, "lr": 0.03, "schedule": "constant", "clip": 0.0},
        "train": {"dtype": "float64", "global_batch_size": 2},
    }
    changed = {name: {**values.get(name, {}), **change} for name, change in sections.items()}
    return from_dict(RunConfig, {**values, **changed})


def gradients(run, batch):
    """Of the run's first step, in float64: what the first moment of a run without history is."""
    fresh_run = replace(run, optimizer=replace(run.optimizer, from_init=False))
    state = make_state(resolve(fresh_run, 1), SINGLE, 100)
    optimizer_step(state, batch, SINGLE)
    kept, fresh = state.optimizer.state, 1 - run.optimizer.beta1
    return {name: kept[p]["exp_avg"] / fresh for name, p in state.model.named_parameters()}


def test_the_next_update_is_that_of_adamw_by_hand(tmp_path):
    """The eighth, of masters in float64; the schedule and the count of steps begin at 0."""
    config = transformers.LlamaConfig(**LLAMA)
    kinds = ("param", *MOMENTS)
    made = {
        kind: parts(random(config, seed, tmp_path / kind, kind == "exp_avg_sq"))
        for seed, kind in enumerate(kinds)
    }
    made["weights"] = parts(random(config, 0).to(torch.bfloat16))
    run = initialized(laid_in(tmp_path / "laid", made))
    windows = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = Batch.from_windows(windows.numpy())
    gradient = gradients(run, batch)
    state = make_state(resolve(run, 1), SINGLE, 100)
    optimizer_step(state, batch, SINGLE)
    assert (state.step, state.updates, state.inherited) == (1, 1, 7)
    w, m, v = (
        {name: value.double() for name, value in open_source(tmp_path / kind).stream()}
        for kind in kinds
    )
    one = run.optimizer
    for name, p in state.model.named_parameters():
        g = gradient[name]
        m_hat = (one.beta1 * m[name] + (1 - one.beta1) * g) / (1 - one.beta1**8)
        v_hat = (one.beta2 * v[name] + (1 - one.beta2) * g**2) / (1 - one.beta2**8)
        decay = one.weight_decay * (p.ndim > 1)
        after = w[name] - one.lr * (decay * w[name] + m_hat / (v_hat.sqrt() + one.eps))
        # weights of 4 at most, rounded some times in float64
        torch.testing.assert_close(p.detach(), after, rtol=0, atol=1e-13)
        assert (after - w[name]).abs().max() > 1e-3


def test_a_run_goes_on_with_the_count_that_it_began_with(material, tmp_path):
    """Stopped after two steps of four it is, to the bit, the run that was not."""
    config = transformers.LlamaConfig(**tinyrun.MODEL)
    made = {
        kind: parts(random(config, seed, squared=kind == "exp_avg_sq"))
        for seed, kind in enumerate(("param", *MOMENTS))
    }
    folder = laid_in(tmp_path / "laid", {**made, "weights": made["param"]})
    model = open_source(folder, vocab_size=300).model
    (folder / "config.json").write_text(json.dumps(model.config))
    run = material.config(
        init=str(folder),
        model=model.config,
        optimizer={"from_init": True, "schedule": "constant"},
        train={"steps": 4},
    )
    for out, ends in (("whole", (4,)), ("parts", (2, 4))):
        for steps in ends:
            one = replace(run, train=replace(run.train, steps=steps))
            run_training(one, tmp_path / out, SINGLE, Console(quiet=True), resumed=steps != ends[0])
    whole, again = (
        Checkpoint(tmp_path / out / "checkpoints" / "step-00000004") for out in ("whole", "parts")
    )
    assert whole.meta["inherited"] == again.meta["inherited"] == 7
    assert whole.meta["updates"] == again.meta["updates"] == 4
    for name in whole.specs:
        assert torch.equal(whole.read(name), again.read(name)), name


def test_moments_that_cannot_begin_a_run_are_refused(laid, tmp_path):
    where, made = laid
    run = initialized(laid_in(tmp_path / "a", made))
    check_moments(resolve(run, 1))
    alone = replace(run, init=str(where / "param"))
    lora = replace(run, adapter=AdapterConfig(rank=2))
    refused = {
        "give --init": replace(run, init=None),
        "has no readable AdamW moments": alone,
        r"adapter.rank \(2\) freezes the weights": lora,
    }
    for why, one in refused.items():
        with pytest.raises(ValueError, match=why):
            check_moments(resolve(one, 1))
    other = laid_in(tmp_path / "b", made, step(7, 8))
    (other / "config.json").write_text(json.dumps(run.model.config))
    unlike = replace(run, init=str(other))
    with pytest.raises(ValueError, match=r"from-init: .*update counts: \[7, 8\]; leave it out"):
        check_moments(resolve(unlike, 1))
    with pytest.raises(ValueError, match="from-init needs AdamW, but .* is muon"):
        OptimizerConfig(name="muon", from_init=True)
