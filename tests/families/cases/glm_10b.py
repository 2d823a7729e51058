"""GLM-10B and GLM-130B, whose positions follow from tokens that their config.json does not name."""

from glm_reference import Glm10B, Glm130B, layer

from cases import Case

PLAIN = True
SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    num_layers=3,
    num_attention_heads=4,
    max_sequence_length=64,
)
CASES = {
    "glm-10b": Case("glm", SIZES | dict(architectures=["GLMModel"]), Glm10B, layer),
    "glm-130b": Case(
        "glm-130b", SIZES | dict(inner_hidden_size=40, layernorm_epsilon=1e-5), Glm130B, layer
    ),
}

GLM_10B = {
    "architectures": ["GLMModel"],
    "attention_dropout_prob": 0.1,
    "attention_scale": 1.0,
    "auto_map": {
        "AutoConfig": "configuration_glm.GLMConfig",
        "AutoModel": "modeling_glm.GLMModel",
        "AutoModelForSeq2SeqLM": "modeling_glm.GLMForConditionalGeneration",
        "AutoModelForMultipleChoice": "modeling_glm.GLMForMultipleChoice",
    },
    "block_position_encoding": True,
    "checkpoint_activations": False,
    "checkpoint_num_layers": 1,
    "embedding_dropout_prob": 0.1,
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "max_sequence_length": 1024,
    "model_type": "glm",
    "num_attention_heads": 64,
    "num_layers": 48,
    "output_dropout_prob": 0.1,
    "output_predict": True,
    "parallel_output": True,
    "pool_token": "cls",
    "relative_encoding": False,
    "spell_func": "lstm",
    "spell_length": None,
    "torch_dtype": "float16",
    "vocab_size": 50304,
}
GLM_130B = {
    "model_type": "glm-130b",
    "num_layers": 70,
    "hidden_size": 12288,
    "inner_hidden_size": 32768,
    "num_attention_heads": 96,
    "vocab_size": 150528,
    "layernorm_epsilon": 1e-05,
    "max_sequence_length": 2048,
}
PUBLISHED = [GLM_10B, GLM_130B]
