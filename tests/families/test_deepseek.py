"""What is DeepSeek's own: layers of a file that are left out, a bias that stays in fp32, and
numbers that are known of the published models.
"""

import json
import warnings

import pytest
import torch
import transformers
from family_cases import build, save
from published import DEEPSEEK_V2, DEEPSEEK_V2_LITE, DEEPSEEK_V3
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dolmen.conversion import hf, hf_export
from dolmen.conversion.source import open_source
from dolmen.core.mesh import SINGLE
from dolmen.families import ModelConfig
from dolmen.model import count
from dolmen.model.build import build as built
from dolmen.model.build import load
from dolmen.model.head import compute_logits
from dolmen.model.spec import check_sharding
from dolmen.serving import engine

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(build("deepseek-v3"), tmp_path_factory.mktemp("deepseek"))


def copied(folder, to, tensors, **fields):
    """The folder with other tensors and fields."""
    to.mkdir()
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(content))
    return to


def test_layers_behind_the_last_are_left_out_aloud(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    more = {
        n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if "rs.2." in n
    }
    more["model.layers.3.eh_proj.weight"] = torch.zeros(32, 64)
    extended = copied(folder, tmp_path / "one", tensors | more)
    with pytest.warns(UserWarning, match=rf"{len(more)} tensors .*num_nextn_predict_layers"):
        model = engine.load_decoder(open_source(extended))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = engine.load_decoder(open_source(folder))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens, compute_logits), plain(tokens, compute_logits))
    none = copied(folder, tmp_path / "none", tensors | more, num_nextn_predict_layers=0)
    with pytest.raises(KeyError, match=rf"{len(more)} tensors have no counterpart"):
        engine.load_decoder(open_source(none))


def dtype_of(file, name):
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name).dtype


def test_the_bias_of_a_router_stays_in_fp32(tmp_path):
    """In a half-precision file, model and export, as transformers keeps it."""
    theirs = build("deepseek-v3").to(torch.bfloat16)
    gate = theirs.model.layers[1].mlp.gate
    for layer in theirs.model.layers[1:]:
        bias = layer.mlp.gate.e_score_correction_bias
        layer.mlp.gate.e_score_correction_bias = bias.float() + 0.0001
    save(theirs, tmp_path / "half")
    assert dtype_of(tmp_path / "half" / "model.safetensors", BIAS) == torch.float32
    ours = engine.load_decoder(open_source(tmp_path / "half"))
    parameters = dict(ours.named_parameters())
    router = parameters["layers.1.mlp.router.bias"]
    assert {p.dtype for p in parameters.values()} == {torch.bfloat16, torch.float32}
    assert torch.equal(router, gate.e_score_correction_bias)
    source = hf.read_config(tmp_path / "half")
    hf_export.save(tmp_path / "back", source, parameters.__getitem__)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("half", "back")]
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
    assert all(tensor.dtype == files[1][name].dtype for name, tensor in files[0].items())


@pytest.mark.parametrize("content", (DEEPSEEK_V2_LITE, DEEPSEEK_V2, DEEPSEEK_V3))
def test_parameters_of_published_models(content):
    spec = ModelConfig(content).spec
    config = transformers.AutoConfig.for_model(**{n: v for n, v in content.items()})
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    biases = sum(param.elements for param in spec.params.values() if not param.trained)
    assert count.parameters(spec) == theirs.num_parameters() + biases
    # in billions, of which so many compute a token, as their papers say
    whole, active = {27: (15.7, 2.4), 60: (236, 21), 61: (671, 37)}[spec.layers]
    assert count.parameters(spec) / 1e9 == pytest.approx(whole, rel=0.003)
    matrices = sum(param.products for param in spec.params.values())
    assert matrices / 1e9 == pytest.approx(active, rel=0.08)


def test_operations_of_a_token():
    """By hand, of one dense and one sparse layer, at 9 tokens: 5 keys on average."""
    spec = ModelConfig(
        dict(
            model_type="deepseek_v2",
            vocab_size=11,
            hidden_size=8,
            intermediate_size=10,
            moe_intermediate_size=3,
            num_hidden_layers=2,
            num_attention_heads=2,
            q_lora_rank=5,
            kv_lora_rank=6,
            qk_nope_head_dim=3,
            qk_rope_head_dim=4,
            v_head_dim=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=2,
            first_k_dense_replace=1,
        )
    ).spec
    attention = 8 * 5 + 5 * 2 * 7 + 8 * (6 + 4) + 6 * 2 * (3 + 2) + 2 * 2 * 8
    dense, sparse = 3 * 8 * 10, 4 * 8 + 2 * 3 * 8 * 3 + 3 * 8 * 6
    scores = 2 * (7 + 2) * 5
    total = 2 * attention + dense + sparse + 11 * 8 + 2 * scores
    assert count.training_flops_per_token(spec, 9) == 6 * total


def test_layouts_that_cannot_be():
    spec = ModelConfig(DEEPSEEK_V2_LITE).spec
    with pytest.raises(
        ValueError, match=r"num_attention_heads \(16\) is not divisible by tp \(3\)"
    ):
        check_sharding(spec.params, {"tp": 3, "ep": 1})
    with pytest.raises(ValueError, match=r"num_experts \(64\) is not divisible by ep \(6\)"):
        check_sharding(spec.params, {"tp": 1, "ep": 6})
    with pytest.raises(ValueError, match="activation memory is known only for plain attention"):
        count.activation_bytes_per_layer(spec, 1, 8)


def test_a_bias_of_its_own_is_no_balance():
    """It is there and not moved, unless asked for: training/balance.py."""
    model = built(ModelConfig({"model_type": "deepseek_v3"} | SMALL).spec, SINGLE)
    load(model, lambda write: [write(n, torch.zeros(p.shape)) for n, p in model.named_parameters()])
    assert model.router.balance == "loss"
    bias = model.layers["1"].mlp.balance_bias
    assert bias is not None and not bias.requires_grad


SMALL = dict(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=10,
    moe_intermediate_size=3,
    num_hidden_layers=2,
    num_attention_heads=2,
    first_k_dense_replace=1,
    n_routed_experts=8,
    n_group=4,
    topk_group=4,
    num_experts_per_tok=2,
    q_lora_rank=5,
    kv_lora_rank=6,
    qk_nope_head_dim=3,
    qk_rope_head_dim=4,
    v_head_dim=2,
)
