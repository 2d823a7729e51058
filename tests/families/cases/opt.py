"""OPT and Galactica."""

from types import SimpleNamespace

from cases import Case

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    ffn_dim=40,
    num_hidden_layers=3,
    num_attention_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)


class FeedForward(SimpleNamespace):
    """What a block has in several modules of its own."""

    def __call__(self, x):
        return self.down(self.act(self.up(x)))


def layer(model, x):
    block = model.model.decoder.layers[1]
    products = {part: getattr(block.self_attn, f"{part}_proj")(x) for part in "qkv"}
    return products, FeedForward(up=block.fc1, act=block.activation_fn, down=block.fc2)


CASES = {
    "opt": Case("opt", SIZES, layer=layer, long=dict(max_position_embeddings=256)),
    # as 350m is: norms after each layer, none before the head, narrow rows of the embedding. But
    # without biases: of these tests' they are near 1, and leave fp32 too little of the gradients
    # of queries (3e-5 apart; in float64 5e-14)
    "opt-350m": Case(
        "opt",
        SIZES | dict(do_layer_norm_before=False, word_embed_proj_dim=16, enable_bias=False),
        layer=layer,
    ),
    # what was fine-tuned before the last norm was found missing; Galactica's activation
    "opt-without-last-norm": Case(
        "opt",
        SIZES
        | dict(
            _remove_final_layer_norm=True,
            layer_norm_elementwise_affine=False,
            activation_function="gelu",
            tie_word_embeddings=False,
        ),
        layer=layer,
    ),
}

OPT_125M = {
    "_name_or_path": "facebook/opt-125m",
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
OPT_350M = OPT_125M | {
    "do_layer_norm_before": False,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "word_embed_proj_dim": 512,
}
GALACTICA_125M = OPT_125M | {
    "activation_function": "gelu",
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "learned_embeddings": True,
    "scale_embeddings": False,
    "vocab_size": 50000,
}
PUBLISHED = [OPT_125M, OPT_350M, GALACTICA_125M]
