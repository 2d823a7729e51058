"""The kernels that a forward and backward call, of every family and each as often as listed: on an
H100, by a model of meta tensors that is built as for one, and on a CPU by really running. On meta
there is no value to read, so the H100's road is also seen to read none.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import build, initialize, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from dolmen.core.mesh import SINGLE
from dolmen.data.batch import Batch
from dolmen.families.family import families
from dolmen.model.decoder import Decoder
from dolmen.model.head import cross_entropy_function
from dolmen.ops.kernels import CPU, H100, Hardware

META = replace(SINGLE, device=torch.device("meta"))
A100 = Hardware("cuda", (8, 0), "NVIDIA A100-SXM4-80GB")
SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
BLOOM = dict(vocab_size=64, hidden_size=64, n_layer=2, n_head=4)
GPT2 = dict(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=32)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
DEEPSEEK = (
    SIZES
    | EXPERTS
    | dict(
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
    )
)
BERT = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
)
IDS = dict(mask=59, gmask=60, sop=61, eop=62)
FIELDS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": SIZES | dict(sliding_window=8),
    "mixtral": SIZES | dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen2": SIZES,
    "qwen3": SIZES | dict(head_dim=16),
    "qwen3_moe": SIZES | EXPERTS | dict(num_experts=4, head_dim=16),
    "qwen2_moe": SIZES | EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=64),
    "olmoe": SIZES | dict(num_experts=4, num_experts_per_tok=2),
    "gpt_oss": SIZES | dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "gemma3_text": SIZES | dict(head_dim=16),
    "bert": BERT,
    "roberta": BERT,
    "gpt2": GPT2,
    "falcon": dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
    "bloom": BLOOM,
    "gemma": SIZES | dict(head_dim=16),
    "gemma2": SIZES | dict(head_dim=16),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK | dict(n_group=2, topk_group=1),
}
COMMON = SIZES | dict(num_key_value_heads=4, head_dim=16)
OWN = {
    "gptj": dict(rotary_dim=8),
    "codegen": dict(rotary_dim=8),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=8),
    **dict.fromkeys(("chatglm", "glm_10b", "glm-130b"), dict(dolmen=dict(special_tokens=IDS))),
}


def small(name: str) -> dict[str, Any]:
    """Of a family that needs no more than what all have, by its own names."""
    own = families()[name].names
    return {own[n]: size for n, size in COMMON.items() if n in own} | OWN.get(name, {})


FIELDS |= {name: small(name) for name in families() if name not in FIELDS}
# Calls of a forward and backward of two layers. cudnn, flash (attention with a window) and fused
# (RMSNorm): one each way. products: of matrices; grouped, loop: those of experts, in one kernel or
# one each; blocks: those of our attention. Gemma's norms are zero-centred, which torch's is not.
LISTED = """
              H100, bfloat16                                    CPU, bfloat16
  llama       cudnn 2, fused 5, products 45                     blocks 14, products 45
  mistral     flash 2, fused 5, products 45                     blocks 14, products 45
  mixtral     cudnn 2, fused 5, products 33, grouped 18         blocks 14, products 33, loop 72
  qwen2       cudnn 2, fused 5, products 45                     blocks 14, products 45
  qwen3       cudnn 2, fused 9, products 45                     blocks 14, products 45
  qwen2_moe   cudnn 2, fused 5, products 57, grouped 18         blocks 14, products 57, loop 72
  olmoe       cudnn 2, fused 5, products 33, grouped 18         blocks 14, products 33, loop 72
  gpt_oss     cudnn 1, flash 1, fused 5, products 39, grouped 18blocks 14, products 39, loop 72
  gemma3_text flash 2, products 45                              blocks 14, products 45
  bert        blocks 14, layer norm 6, products 42              blocks 14, layer norm 6, products 42
  roberta     blocks 14, layer norm 6, products 42              blocks 14, layer norm 6, products 42
  qwen3_moe   cudnn 2, fused 9, products 33, grouped 18         blocks 14, products 33, loop 72
  gpt2        cudnn 2, layer norm 5, products 39                blocks 14, layer norm 5, products 39
  falcon      cudnn 2, layer norm 3, products 39                blocks 14, layer norm 3, products 39
  bloom       blocks 14, layer norm 6, products 39              blocks 14, layer norm 6, products 39
  gemma       cudnn 2, products 45                              blocks 14, products 45
  gemma2      blocks 14, products 45                            blocks 14, products 45
  deepseek_v2 cudnn 2, fused 9, products 54, grouped 9          blocks 14, products 54, loop 36
  deepseek_v3 cudnn 2, fused 9, products 54, grouped 9          blocks 14, products 54, loop 36
  baichuan    cudnn 2, fused 5, products 45                     blocks 14, products 45
  chatglm     blocks 14, layer norm 5, products 39              blocks 14, layer norm 5, products 39
  chatglm2    cudnn 2, fused 5, products 45                     blocks 14, products 45
  codegen     cudnn 2, layer norm 3, products 39                blocks 14, layer norm 3, products 39
  cohere      cudnn 2, layer norm 3, products 45                blocks 14, layer norm 3, products 45
  cohere2     flash 2, layer norm 3, products 45                blocks 14, layer norm 3, products 45
  glm         cudnn 2, fused 5, products 45                     blocks 14, products 45
  glm4        cudnn 2, fused 9, products 45                     blocks 14, products 45
  glm_10b     blocks 14, layer norm 5, products 39              blocks 14, layer norm 5, products 39
  glm-130b    blocks 14, layer norm 5, products 45              blocks 14, layer norm 5, products 45
  gpt_bigcode cudnn 2, layer norm 5, products 39                blocks 14, layer norm 5, products 39
  gpt_neo     cudnn 1, flash 1, layer norm 5, products 39       blocks 14, layer norm 5, products 39
  gpt_neox    cudnn 2, layer norm 5, products 39                blocks 14, layer norm 5, products 39
  gptj        cudnn 2, layer norm 3, products 39                blocks 14, layer norm 3, products 39
  granite     cudnn 2, fused 5, products 45                     blocks 14, products 45
  internlm2   cudnn 2, fused 5, products 45                     blocks 14, products 45
  mpt         blocks 14, layer norm 5, products 39              blocks 14, layer norm 5, products 39
  olmo        cudnn 2, layer norm 5, products 45                blocks 14, layer norm 5, products 45
  olmo2       cudnn 2, fused 5, products 45                     blocks 14, products 45
  opt         cudnn 2, layer norm 5, products 39                blocks 14, layer norm 5, products 39
  phi         cudnn 2, layer norm 3, products 39                blocks 14, layer norm 3, products 39
  phi3        cudnn 2, fused 5, products 45                     blocks 14, products 45
  qwen        cudnn 2, fused 5, products 45                     blocks 14, products 45
  stablelm    cudnn 2, layer norm 5, products 45                blocks 14, layer norm 5, products 45
  starcoder2  cudnn 2, layer norm 5, products 39                blocks 14, layer norm 5, products 39
"""
NAMES = {
    "_flash_attention_forward.default": "flash",
    "_flash_attention_backward.default": "flash back",
    "_scaled_dot_product_cudnn_attention.default": "cudnn",
    "_scaled_dot_product_cudnn_attention_backward.default": "cudnn back",
    "_fused_rms_norm_backward.default": "fused",
    "native_layer_norm.default": "layer norm",
    "native_layer_norm_backward.default": "layer norm back",
    "_grouped_mm.default": "grouped",
    "bmm.default": "blocks",
    "baddbmm.default": "blocks",
    "mm.default": "products",
    "addmm.default": "products",
    "addmm_.default": "products",
    "mm.out": "loop",
}
UNLISTED = ("attention", "attn", "norm", "mm", "conv", "fused", "scaled")  # in names of kernels


def listed(name: str, hardware: Hardware) -> dict[str, int]:
    line = next(line for line in LISTED.splitlines() if line.split()[:1] == [name])
    text = line[14:64] if hardware is H100 else line[64:]
    calls = {words: int(n) for words, _, n in (c.strip().rpartition(" ") for c in text.split(","))}
    return calls | {f"{w} back": calls[w] for w in ("flash", "cudnn", "layer norm") if w in calls}


class Called(TorchDispatchMode):
    """Kernels that are called, by their names in the list."""

    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = f"{function.overloadpacket.__name__}.{function._overloadname}"
        listed = any(part in name for part in UNLISTED) and "cummin" not in name
        if name in NAMES or listed:
            self.found[NAMES.get(name, name)] += 1
        return function(*args, **(kwargs or {}))


def made(name: str, hardware: Hardware, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Of two layers; with values where they are computed with."""
    model = tiny(name, **FIELDS[name])
    if hardware is not CPU:
        return build(model, META, dtype=dtype, hardware=hardware)
    decoder = build(model, SINGLE, dtype=dtype)
    initialize(decoder, 0)
    return decoder


def called(model: Decoder) -> dict[str, int]:
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens, tokens).read_by(model.spec).to(next(model.parameters()).device)
    end = cross_entropy_function(batch.tokens)
    with Called() as seen:
        model(batch.tokens, end, documents=batch.documents, positions=batch.positions).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None or not model.spec.params[name].trained, name
    return dict(seen.found)


@pytest.mark.parametrize("hardware", [H100, CPU], ids=["H100", "CPU"])
@pytest.mark.parametrize("name", FIELDS)
def test_what_is_called_is_what_is_listed(name, hardware):
    """And what the header of a run says was chosen."""
    model = made(name, hardware)
    found, chosen = called(model), model.split.kernels
    assert found == listed(name, hardware)
    fused = bool({"flash", "cudnn"} & set(found))
    assert fused == (chosen.attention == "cudnn") != ("blocks" in found)
    assert ("grouped" in found) <= (chosen.grouped == "grouped_mm")
    assert ("loop" in found) <= (chosen.grouped == "loop")
    assert ("fused" in found) <= (chosen.norm == "fused")


def test_every_family_is_listed():
    assert FIELDS.keys() == families().keys()


def test_without_half_precision_an_h100_has_our_blocks():
    found = called(made("llama", H100, torch.float32))
    assert found == {"blocks": 14, "fused": 5, "products": 45}


def test_a_host_that_reads_is_seen():
    """Of an A100 experts are a loop, for which the host must know how many rows each has."""
    kernels = made("mixtral", A100).split.kernels
    assert "experts by loop" in kernels.describe(experts=True)
    assert "experts" not in kernels.describe(experts=False)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        called(made("mixtral", A100))
