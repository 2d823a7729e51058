"""Megatron's checkpoints, laid by hand (laid.py) in every way that its code has saved them, compute
what transformers computes; what is missing, foreign or of other sizes is refused in a line.
"""

import argparse
import shutil
from math import inf

import pytest
import torch
import transformers
from laid import (
    FUSED,
    GROUPED,
    LOCAL,
    OF_2023,
    OLD,
    TE,
    TE_2023,
    V25,
    How,
    lay,
    of_gpt2,
    of_llama,
    of_mixtral,
)

from dolmen.conversion.source import open_source, pin_source
from dolmen.core.mesh import SINGLE
from dolmen.evaluation.verify import verify
from dolmen.model import head
from dolmen.model.layout import Layout
from dolmen.serving import engine
from dolmen.training.checks.model import check_init
from dolmen.training.config import RunConfig
from dolmen.training.initialize import make_state
from dolmen.training.resolve import resolve

VOCABULARY = 61
LLAMA = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-3,
)
GPT2 = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=64)
TOKENS = torch.arange(40).reshape(2, 20) * 7 % VOCABULARY


def built(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.2 + (p.ndim == 1))
    return model


@pytest.fixture(scope="module")
def models():
    made = {
        "llama": built(transformers.LlamaConfig(**LLAMA)),
        "llama, tied": built(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
        "mixtral": built(transformers.MixtralConfig(**LLAMA, num_local_experts=4)),
        "gpt2": built(transformers.GPT2Config(**GPT2)),
        "gpt2, erf": built(transformers.GPT2Config(**GPT2, activation_function="gelu")),
    }
    with torch.no_grad():
        return {name: (model, model(TOKENS).logits) for name, model in made.items()}


def parts(model):
    made = {"gpt2": of_gpt2, "llama": of_llama, "mixtral": of_mixtral}
    return made[model.config.model_type](model)


def difference(folder, logits, rows=VOCABULARY) -> float:
    decoder = engine.load_decoder(open_source(folder, vocab_size=rows))
    with torch.no_grad():
        return float((decoder(TOKENS, head.compute_logits) - logits).abs().max())


ONE, TWO = [[4]], [[2, 2]]
VIRTUAL, UNEVEN = [[1, 1], [1, 1]], [[1, 3]]
CASES = {
    # generation by generation
    "v1.0, no version, no groups": (
        "gpt2, erf",
        How(OLD, None, 2, ONE, {"bias_gelu_fusion": None}),
    ),
    "version 0, tp 2": ("gpt2", How(OLD, 0, 2, ONE)),
    "version 1, tp 2": ("gpt2", How(OLD, 1.0, 2, ONE)),
    "version 2, tp 2": ("gpt2", How(OLD, 2.0, 2, ONE)),
    "v2.0, pp 2": ("gpt2", How(OLD, 3.0, 1, TWO)),
    "v2.5, uneven": ("gpt2", How(V25, 3.0, 2, UNEVEN)),
    "2023, groups": ("llama", How(OF_2023, 3.0, 2, TWO)),
    "2023, virtual stages": ("llama", How(OF_2023, 3.0, 2, VIRTUAL)),
    "core": ("llama", How(LOCAL, 3.0, 2, TWO)),
    "core, virtual stages, release": ("llama", How(LOCAL, 3.0, 1, VIRTUAL, iteration="release")),
    "core, tied": ("llama, tied", How(LOCAL, 3.0, 2, TWO)),
    "core, gpt2": ("gpt2", How(LOCAL, 3.0, 2, UNEVEN)),
    "core with te": ("llama", How(TE, 3.0, 2, TWO)),
    "core with te, gpt2": ("gpt2", How(TE, 3.0, 2, ONE)),
    "te of 2023": ("llama", How(TE_2023, 3.0, 2, ONE)),
    "te of 2023, gpt2": ("gpt2", How(TE_2023, 3.0, 2, ONE)),
    "core, more ranks than groups": ("llama", How(LOCAL, 3.0, 4, ONE)),
    "core, experts": ("mixtral", How(LOCAL, 3.0, 2, TWO)),
    "core, experts over ep": ("mixtral", How(LOCAL, 3.0, 2, TWO, ep=2)),
    "core, experts in one tensor": ("mixtral", How(GROUPED, 3.0, 2, TWO, ep=2)),
    "te, experts over ep": ("mixtral", How(TE, 3.0, 2, ONE, ep=4)),
    "te, operations fused": ("llama", How(FUSED, 3.0, 1, TWO)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, models, tmp_path):
    name, how = CASES[case]
    model, logits = models[name]
    folder = lay(tmp_path, parts(model), how)
    assert difference(folder, logits) < 2e-5
    source = open_source(folder, vocab_size=VOCABULARY)
    assert source.iteration == (0 if how.iteration == "release" else 12)


@pytest.mark.parametrize(
    "fault",
    ["gate and up are swapped", "gate and up are joined before the cut", "k and v are swapped"],
)
@pytest.mark.parametrize("names", [LOCAL, OF_2023], ids=["core", "2023"])
def test_the_logits_see_a_swap(fault, names, models, tmp_path):
    model, logits = models["llama"]
    folder = lay(tmp_path, parts(model), How(names, 3.0, 2, ONE, faults=(fault,)))
    assert difference(folder, logits) > 0.1


ARGS = {
    # the older classes turn by 10000, whatever they were told
    "rope of the older": ("llama", OF_2023, {"rotary_base": 50000}, True),
    "rope of core": ("llama", LOCAL, {"rotary_base": 50000}, False),
    "one group, and none asked for": (
        "gpt2", LOCAL, {"group_query_attention": False, "num_query_groups": 1}, True,
    ),
    "erf, where nothing is fused": ("gpt2, erf", V25, {"bias_gelu_fusion": False}, True),
    "erf is not tanh": ("gpt2, erf", V25, {"bias_gelu_fusion": True}, False),
    "tanh, of the older": ("gpt2", V25, {"bias_gelu_fusion": False, "openai_gelu": True}, True),
    "which core does not look at": (
        "gpt2, erf", LOCAL, {"bias_gelu_fusion": False, "openai_gelu": True}, True,
    ),
    "another eps": ("llama", LOCAL, {"norm_epsilon": 1e-5}, False),
    "eps by its other name": (
        "llama", LOCAL, {"norm_epsilon": None, "layernorm_epsilon": 1e-3}, True,
    ),
    "rope by its older name": (
        "llama", OF_2023,
        {"position_embedding_type": None, "use_rotary_position_embeddings": True}, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGS)
def test_args_are_read_as_the_code_that_saved_them_computes(case, models, tmp_path):
    name, names, args, same = ARGS[case]
    model, logits = models[name]
    folder = lay(tmp_path, parts(model), How(names, 3.0, 1, ONE, args))
    assert (difference(folder, logits) < 2e-5) is same


def test_norms_that_are_stored_less_one(models, tmp_path):
    model, logits = models["gpt2"]
    made = parts(model)
    for tensors in (made.ends, *made.layers):
        for name in tensors:
            if name in ("norm.weight", "norm1.weight", "norm2.weight"):
                tensors[name] = tensors[name] - 1
    for i, option in enumerate(("apply_layernorm_1p", "layernorm_zero_centered_gamma")):
        folder = lay(tmp_path / str(i), made, How(LOCAL, 3.0, 2, ONE, {option: True}))
        assert difference(folder, logits) < 2e-5


@pytest.fixture
def folder(models, tmp_path):
    model, _ = models["llama, tied"]
    return lay(tmp_path / "m", parts(model), How(LOCAL, 3.0, 2, TWO))


def rewrite(file, change):
    values = torch.load(file, weights_only=False)
    change(values)
    torch.save(values, file)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda it: shutil.rmtree(it / "mp_rank_00_002"),
            "has 3 ranks of 4.*mp_rank_00_002 is mis",
        ),
        (
            lambda it: rewrite(
                it / "mp_rank_00_003/model_optim_rng.pt",
                lambda v: [v["model"].pop(n) for n in list(v["model"]) if "linear_fc2.weight" in n],
            ),
            r"mlp.experts.linear_fc2.weight0 .* together, but the model expects .4, 32, 40",
        ),
    ],
)
def test_a_rank_of_experts_that_is_not_whole(damage, said, models, tmp_path):
    folder = lay(tmp_path, parts(models["mixtral"][0]), How(TE, 3.0, 1, ONE, ep=4))
    damage(folder / "iter_0000012")
    with pytest.raises((ValueError, KeyError), match=said):
        dict(open_source(folder, vocab_size=VOCABULARY).stream())


LAST, FIRST = "mp_rank_01_001/model_optim_rng.pt", "mp_rank_00_000/model_optim_rng.pt"


def cut(file):
    file.write_bytes(file.read_bytes()[:2000])


class Evil:
    def __reduce__(self):
        return print, ("evil",)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda it: shutil.rmtree((it / LAST).parent),
            r"iter_0000012 has 3 ranks of 4 \(tp 2, pp 2\): mp_rank_01_001 is missing",
        ),
        (lambda it: (it / LAST).unlink(), r"mp_rank_01_001 has no model_optim_rng.pt"),
        (lambda it: cut(it / LAST), "mp_rank_01_001/model_optim_rng.pt: cannot be read"),
        (
            lambda it: rewrite(it / LAST, lambda v: v.update(rng=Evil())),
            "it names __builtin__.print, which is not allowed",
        ),
        (
            lambda it: rewrite(it / FIRST, lambda v: setattr(v["args"], "num_layers", 6)),
            "has 4 layers, num_layers in its args is 6",
        ),
        (
            lambda it: rewrite(it / FIRST, lambda v: setattr(v["args"], "squared_relu", True)),
            "squared_relu is True: in a Megatron checkpoint it must be False",
        ),
        (
            lambda it: rewrite(it / FIRST, lambda v: setattr(v["args"], "num_layers", "4")),
            "model_optim_rng.pt, args: num_layers",
        ),
        (
            lambda it: rewrite(it / FIRST, lambda v: setattr(v["args"], "norm_epsilon", -1.0)),
            "model_optim_rng.pt, args: norm_epsilon is -1.0: it must be at least 0",
        ),
        (
            lambda it: rewrite(it / FIRST, lambda v: setattr(v["args"], "init_method_std", inf)),
            "model_optim_rng.pt, args: init_method_std is inf: it must be finite",
        ),
        (lambda it: rewrite(it / LAST, lambda v: v.pop("args")), "has no `args`"),
        (lambda it: rewrite(it / LAST, lambda v: v.pop("model")), "has no `model`"),
        (
            lambda it: rewrite(it / LAST, lambda v: v.update(iteration=13)),
            r"ranks are from different iterations, \['12', '13'\]",
        ),
        (
            lambda it: rewrite(
                it / LAST, lambda v: v["model"].pop("decoder.layers.0.mlp.linear_fc1.weight")
            ),
            "decoder.layers.0.mlp.linear_fc1.weight has different shapes on the 2 tp ranks",
        ),
        (
            lambda it: rewrite(it / LAST, lambda v: v["model"].update(surprise=torch.ones(2))),
            r"1 tensor has no counterpart in the model, e.g. \['surprise'\]",
        ),
        (
            lambda it: rewrite(it / LAST, lambda v: v["model"]["output_layer.weight"].add_(1)),
            "output_layer.weight in .*mp_rank_01_001.* differs from embedding.word_embeddings",
        ),
        (
            lambda it: (it.parent / "latest_checkpointed_iteration.txt").write_text("13"),
            "contains 13, but there is no folder iter_0000013",
        ),
        (
            lambda it: (it.parent / "latest_checkpointed_iteration.txt").write_text("../x"),
            "contains '../x': it must be a step number or release",
        ),
    ],
)
def test_what_is_not_whole_is_refused(folder, damage, said):
    damage(folder / "iter_0000012")
    with pytest.raises((ValueError, KeyError), match=said):
        dict(open_source(folder, vocab_size=VOCABULARY).stream())


def test_how_many_tokens_there_are(folder, tmp_path):
    """Is asked for, or read of what lies beside; never taken from rows that may be padding."""
    with pytest.raises(ValueError, match="has 256 .* rows, padding included.*give --vocab-size"):
        open_source(folder)
    with pytest.raises(ValueError, match="has 256 embedding rows, fewer than 300 tokens"):
        open_source(folder, vocab_size=300)
    source = open_source(folder, vocab_size=VOCABULARY)
    assert source.read("embed.weight").shape == (VOCABULARY, 32)
    assert source.model.dtype == "float32"
    transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True).save_pretrained(folder)
    assert open_source(folder).spec == open_source(folder / "iter_0000012").spec == source.spec
    with pytest.raises(
        ValueError, match="--vocab-size is 62, but vocab_size is 61 in .*config.json"
    ):
        open_source(folder, vocab_size=62)
    transformers.LlamaConfig(**LLAMA | {"rms_norm_eps": 1e-6}).save_pretrained(folder)
    with pytest.warns(UserWarning, match="config.json is used: norm.eps = 1e-06, in args"):
        open_source(folder)


def test_what_reads_a_model_reads_ranks(models, tmp_path):
    """verify, --init, and what names them: the folder of the ranks, or of one iteration."""
    model, logits = models["llama, tied"]
    folder = lay(tmp_path / "m", parts(model), How(LOCAL, 3.0, 2, TWO))
    model.config.save_pretrained(folder)
    assert pin_source(folder) == str(folder / "iter_0000012")
    report = verify(open_source(pin_source(folder)), length=8)
    assert report.ok
    run = RunConfig(model=open_source(folder).model, init=str(folder), layout=Layout(dp=1))
    check_init(resolve(run, 1))
    started = make_state(resolve(run, 1), SINGLE, 1).model
    with torch.no_grad():
        assert float((started(TOKENS, head.compute_logits) - logits).abs().max()) < 2e-5


def test_a_namespace_alone_is_taken(tmp_path):
    where = tmp_path / "iter_0000001/mp_rank_00"
    where.mkdir(parents=True)
    torch.save({"args": {"num_layers": 1}, "model": {}}, where / "model_optim_rng.pt")
    with pytest.raises(ValueError, match="has no `args`"):
        open_source(tmp_path / "iter_0000001", vocab_size=5)
    torch.save({"args": argparse.Namespace(), "model": {}}, where / "model_optim_rng.pt")
    with pytest.raises(ValueError, match="num_layers"):
        open_source(tmp_path / "iter_0000001", vocab_size=5)
