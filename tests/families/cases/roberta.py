"""RoBERTa."""

from cases import Case


def layer(model, x):
    block = model.roberta.encoder.layer[1]
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
    type_vocab_size=1,
)
CASES = {
    # the head has gelu all the same
    "roberta": Case("roberta", SIZES | dict(hidden_act="relu"), layer=layer, fills=True),
}
PUBLISHED = [
    {  # base
        "architectures": ["RobertaForMaskedLM"],
        "attention_probs_dropout_prob": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 514,
        "model_type": "roberta",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "pad_token_id": 1,
        "type_vocab_size": 1,
        "vocab_size": 50265,
    },
]
