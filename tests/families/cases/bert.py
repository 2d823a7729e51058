"""BERT."""

from cases import Case


def layer(model, x):
    block = model.bert.encoder.layer[1]
    attention = block.attention.self
    products = {"q": attention.query(x), "k": attention.key(x), "v": attention.value(x)}

    def mlp(x):
        return block.output.dense(block.intermediate(x))

    mlp.act = block.intermediate.intermediate_act_fn
    return products, mlp


SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,  # behind a third tokens are alike, and what tells them apart is rounding
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=None,  # transformers gives its row no gradient
)
CASES = {
    "bert": Case("bert", SIZES | dict(layer_norm_eps=1e-2), layer=layer, fills=True),
}
PUBLISHED = [
    {  # base, uncased: its file has both heads, its config.json states one
        "architectures": ["BertForMaskedLM"],
        "attention_probs_dropout_prob": 0.1,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "model_type": "bert",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "transformers_version": "4.6.0.dev0",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": 30522,
    },
    {"model_type": "bert", "architectures": ["BertForPreTraining"], "hidden_act": "gelu_new"},
]
