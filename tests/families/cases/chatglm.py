"""ChatGLM-6B of both versions, and what has its model_type: ChatGLM2-6B and later ones."""

from glm_reference import ChatGlm, ChatGlm2, layer

from cases import Case

PLAIN = True
IDS = dict(bos_token_id=57, eos_token_id=58, mask_token_id=55, gmask_token_id=56, pad_token_id=3)
SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    num_layers=3,
    num_attention_heads=4,
    inner_hidden_size=40,
    layernorm_epsilon=1e-5,
    max_sequence_length=64,
)
CHATGLM2 = dict(
    padded_vocab_size=61,
    hidden_size=32,
    ffn_hidden_size=40,
    num_layers=3,
    num_attention_heads=4,
    multi_query_attention=True,
    multi_query_group_num=2,
    kv_channels=12,  # heads are wider than their share
    add_qkv_bias=True,
    seq_length=64,
    rope_ratio=0.01,
    layernorm_epsilon=1e-5,
    tie_word_embeddings=False,
    eos_token_id=2,
    _name_or_path="THUDM/chatglm3-6b-32k",
)
CASES = {
    # the head is the embedding, and stored beside it
    "chatglm": Case("chatglm", SIZES | IDS, ChatGlm, layer),
    "chatglm-untied": Case(
        "chatglm",
        SIZES | IDS | dict(tie_word_embeddings=False),
        ChatGlm,
        layer,
        long=dict(max_sequence_length=256),
    ),
    "chatglm2": Case("chatglm", CHATGLM2, ChatGlm2, layer),
    # of the first that were longer, whose code divides positions
    "chatglm2-32k": Case(
        "chatglm",
        CHATGLM2 | dict(rope_ratio=4, _name_or_path="THUDM/chatglm2-6b-32k"),
        ChatGlm2,
        layer,
    ),
}

CODE = {
    "AutoConfig": "configuration_chatglm.ChatGLMConfig",
    "AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration",
    "AutoModelForSeq2SeqLM": "modeling_chatglm.ChatGLMForConditionalGeneration",
}
CHATGLM_V01 = {
    "_name_or_path": "THUDM/chatglm-6b",
    "architectures": ["ChatGLMModel"],
    "auto_map": CODE,
    "bos_token_id": 150004,
    "eos_token_id": 150005,
    "pad_token_id": 20003,
    "hidden_size": 4096,
    "inner_hidden_size": 16384,
    "layernorm_epsilon": 1e-05,
    "max_sequence_length": 2048,
    "model_type": "chatglm",
    "num_attention_heads": 32,
    "num_layers": 28,
    "position_encoding_2d": True,
    "torch_dtype": "float16",
    "transformers_version": "4.23.1",
    "use_cache": True,
    "vocab_size": 150528,
}
CHATGLM_V11 = CHATGLM_V01 | {
    "bos_token_id": 130004,
    "eos_token_id": 130005,
    "mask_token_id": 130000,
    "gmask_token_id": 130001,
    "pad_token_id": 3,
    "pre_seq_len": None,
    "prefix_projection": False,
    "quantization_bit": 0,
    "vocab_size": 130528,
}
CHATGLM3 = {
    "_name_or_path": "THUDM/chatglm3-6b",
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["ChatGLMModel"],
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "auto_map": CODE,
    "bias_dropout_fusion": True,
    "classifier_dropout": None,
    "eos_token_id": 2,
    "ffn_hidden_size": 13696,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "kv_channels": 128,
    "layernorm_epsilon": 1e-05,
    "model_type": "chatglm",
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_layers": 28,
    "original_rope": True,
    "pad_token_id": 0,
    "padded_vocab_size": 65024,
    "post_layer_norm": True,
    "pre_seq_len": None,
    "prefix_projection": False,
    "quantization_bit": 0,
    "rmsnorm": True,
    "seq_length": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.27.1",
    "use_cache": True,
    "vocab_size": 65024,
}
GLM_4_9B_CHAT = CHATGLM3 | {
    "_name_or_path": "THUDM/glm-4-9b-chat",
    "eos_token_id": [151329, 151336, 151338],
    "layernorm_epsilon": 1.5625e-07,
    "num_layers": 40,
    "padded_vocab_size": 151552,
    "rope_ratio": 500,
    "seq_length": 131072,
    "vocab_size": 151552,
}
PUBLISHED = [CHATGLM_V01, CHATGLM_V11, CHATGLM3, GLM_4_9B_CHAT]
