"""CodeGen."""

from cases import Case
from cases.gptj import GPTJ_6B, SIZES


def layer(model, x):
    """As its attention takes them apart: in blocks of queries, values and keys."""
    block = model.transformer.h[1]
    blocks = block.attn.qkv_proj(x).unflatten(-1, (4, 3, -1)).unbind(-2)
    return {name: part.flatten(1) for name, part in zip("qvk", blocks, strict=True)}, block.mlp


CASES = {
    # a block has two heads
    "codegen": Case("codegen", SIZES | dict(n_head=8), layer=layer, long=dict(n_positions=256)),
}

CODEGEN_2B = GPTJ_6B | {
    "architectures": ["CodeGenForCausalLM"],
    "bos_token_id": 1,
    "model_type": "codegen",
    "n_ctx": 2048,
    "n_embd": 2560,
    "n_head": 32,
    "n_layer": 32,
    "torch_dtype": "float16",
    "transformers_version": "4.21.0.dev0",
    "vocab_size": 51200,
}
PUBLISHED = [CODEGEN_2B]
