"""DeepSeek's attention in Megatron's files, laid by hand: what is read computes what transformers
computes, what is written is what is laid, and what versions of Megatron-Core compute otherwise than
each other is refused.
"""

import pytest
import torch
import transformers
from laid import LOCAL, TE, How, lay, of_deepseek
from test_convert import run, same
from test_megatron_read import TOKENS, VOCABULARY, built, difference

from dolmen.conversion.source import open_source

SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=40,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    n_routed_experts=4,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    max_position_embeddings=64,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=100.0,
    factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=4.0,
    beta_slow=1.0,
    mscale=0.9,
    mscale_all_dim=0.9,
)


@pytest.fixture(scope="module")
def models():
    v3 = SIZES | dict(n_group=2, topk_group=1, n_shared_experts=1, rope_parameters=YARN)
    v2 = SIZES | dict(q_lora_rank=None, n_shared_experts=2)
    made = {
        "v3": built(transformers.DeepseekV3Config(**v3)),
        "v2": built(transformers.DeepseekV2Config(**v2)),
    }
    with torch.no_grad():
        return {name: (model, model(TOKENS).logits) for name, model in made.items()}


ONE, TWO = [[2]], [[1, 1]]
CASES = {
    "own layers cut what makes latents": ("v3", How(LOCAL, 3.0, 2, TWO)),
    "te has it whole": ("v3", How(TE, 3.0, 2, ONE)),
    "no latent of queries": ("v2", How(TE, 3.0, 2, ONE)),
    "no latent of queries, own layers": ("v2", How(LOCAL, 3.0, 1, TWO)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, models, tmp_path):
    """And what is written of that model is what is laid by hand."""
    name, how = CASES[case]
    model, logits = models[name]
    how.iteration = "release"
    folder = lay(tmp_path / "laid", of_deepseek(model), how)
    assert difference(folder, logits) < 2e-5
    model.save_pretrained(tmp_path / "hf")
    spec = "te" if how.names is TE else "local"
    reported = run(
        tmp_path / "hf", tmp_path / "out", "megatron-core", tp=how.tp, pp=how.pp, spec=spec
    )
    assert reported.endswith("parameters read back, equal bit for bit; logits equal")
    for rank in (folder / "release").iterdir():
        theirs = torch.load(rank / "model_optim_rng.pt", weights_only=False)
        ours = torch.load(
            tmp_path / "out/release" / rank.name / "model_optim_rng.pt", weights_only=False
        )
        assert ours["model"].keys() - theirs["model"].keys() <= {"output_layer._extra_state"}
        for tensor, expected in theirs["model"].items():
            same(tensor, ours["model"][tensor], expected, int(rank.name[8:10]), how)
        for option, value in vars(theirs["args"]).items():
            assert vars(ours["args"])[option] == value, option


@pytest.mark.parametrize("fault", ["the rope key comes first", "keys and values are swapped"])
def test_the_logits_see_a_swap(fault, models, tmp_path):
    model, logits = models["v3"]
    folder = lay(tmp_path, of_deepseek(model), How(LOCAL, 3.0, 2, ONE, faults=(fault,)))
    assert difference(folder, logits) > 0.1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            {"mscale_all_dim": 0.0},
            "mscale is 0.9, mscale_all_dim 0.0: older versions .* by the first",
        ),
        ({"mscale": None}, "mscale is None, mscale_all_dim 0.9: older versions"),
        (
            {"original_max_position_embeddings": None},
            r"original_max_position_embeddings is missing: .*embeddings \(64\), others 4096",
        ),
        ({"rope_type": "rope"}, "rotary_scaling_factor is 4.0 and mscale 0.9 with rope_type rope"),
        ({"rotary_scaling_factor": 0.5}, "rotary_scaling_factor is 0.5: it must be at least 1"),
        ({"qk_layernorm": False}, "multi_latent_attention without qk_layernorm"),
        ({"rotary_interleaved": True}, "rotary_interleaved is True with multi_latent_attention"),
        ({"rotary_percent": 0.5}, "rotary_percent is 0.5 with multi_latent_attention"),
        ({"mla_down_proj_fusion": True}, "mla_down_proj_fusion is True"),
    ],
)
def test_what_versions_compute_differently_is_refused(args, said, models, tmp_path):
    folder = lay(tmp_path, of_deepseek(models["v3"][0]), How(TE, 3.0, 1, ONE, args))
    with pytest.raises(ValueError, match=said):
        open_source(folder, vocab_size=VOCABULARY)


def test_the_first_context_that_all_versions_take(models, tmp_path):
    made, said = of_deepseek(models["v3"][0]), {"max_position_embeddings": 4096}
    folder = lay(
        tmp_path,
        made,
        How(TE, 3.0, 1, ONE, said | {"original_max_position_embeddings": None, "rope_type": None}),
    )
    positions = open_source(folder, vocab_size=VOCABULARY).spec.blocks[0].mixer.positions
    assert positions.scaling.original_max_position_embeddings == 4096


def test_torch_dist(models, tmp_path):
    model, logits = models["v3"]
    model.save_pretrained(tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "d", "torch-dist")
    assert difference(tmp_path / "d", logits) < 2e-5
    reader = torch.distributed.checkpoint.FileSystemReader(tmp_path / "d" / "release")
    keys = set(reader.read_metadata().state_dict_metadata)
    start = "decoder.layers.0."
    assert {
        f"{start}input_layernorm.weight",
        f"{start}self_attention.linear_q_up_proj.layer_norm_weight",
        f"{start}self_attention.linear_kv_up_proj.layer_norm_weight",
        f"{start}mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.1.mlp.router.expert_bias",
    } <= keys


@pytest.mark.parametrize(
    ("changed", "to", "options", "said"),
    [
        (
            {"first_k_dense_replace": 2},
            "megatron",
            {},
            "before Megatron-Core cannot compute attention",
        ),
        (
            {"rope_parameters": YARN | {"mscale": 0.7}},
            "megatron-core",
            {},
            "cannot compute rope_scaling.attention_factor",
        ),
        ({"rms_norm_eps": 0.1}, "megatron-core", {}, "cannot compute attention.norm.eps = 1e-06"),
        (
            {},
            "megatron-core",
            {"tp": 2, "spec": "local"},
            "has 15 rows, which are not divisible by --tp 2",
        ),
    ],
)
def test_what_megatron_does_not_compute(changed, to, options, said, tmp_path):
    config = SIZES | dict(n_group=2, topk_group=1, n_shared_experts=1, rope_parameters=YARN)
    config |= {"q_lora_rank": 15, **changed}
    built(transformers.DeepseekV3Config(**config)).save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match=said):
        run(tmp_path / "m", tmp_path / "out", to, **options)
    assert not (tmp_path / "out").exists()
