"""The second golden table: what is trained, option by option. A row is a run of a few steps, of
which frozen.json holds what the oracle's float64 has given; test_oracle.py holds dolmen to it.

A name is the node id of its test, `tests/oracle/test_oracle.py::test_row[NAME]`, and stays.
"""

from dataclasses import dataclass, field
from typing import Any

from adapter import RARE, VOCABULARY, Data
from trainer import Job, MuonJob

SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    rms_norm_eps=1e-5,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=None,  # a row of padding would get no gradient from the embedding
    tie_word_embeddings=False,
)
ROPE = dict(rope_type="default", rope_theta=500.0)  # so low that 12 tokens feel it
EXPERTS = SIZES | dict(num_experts_per_tok=2, rope_parameters=ROPE)
MODELS = {
    "llama": ("llama", SIZES | dict(rope_parameters=ROPE)),
    "llama3": (
        "llama",
        SIZES
        | dict(
            rope_parameters=ROPE
            | dict(
                rope_type="llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
            max_position_embeddings=64,
        ),
    ),
    "linear": (
        "llama",
        SIZES | dict(rope_parameters=ROPE | dict(rope_type="linear", factor=2.0)),
    ),
    "biased": (
        "llama",
        SIZES | dict(rope_parameters=ROPE, attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    ),
    "mistral": ("mistral", SIZES | dict(rope_parameters=ROPE, sliding_window=5, head_dim=16)),
    "qwen2": ("qwen2", SIZES | dict(rope_parameters=ROPE, num_key_value_heads=1)),
    "qwen2-window": (
        "qwen2",
        SIZES
        | dict(
            rope_parameters=ROPE,
            use_sliding_window=True,
            sliding_window=4,
            layer_types=["full_attention", "sliding_attention"],
        ),
    ),
    "qwen3": (
        "qwen3",
        SIZES | dict(rope_parameters=ROPE, head_dim=12, tie_word_embeddings=True),
    ),
    "gpt2": (
        "gpt2",
        dict(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=16,
            bos_token_id=None,
            eos_token_id=0,
        ),
    ),
    "mixtral": ("mixtral", EXPERTS | dict(num_local_experts=4, sliding_window=None)),
    "qwen3-moe": (
        "qwen3_moe",
        EXPERTS
        | dict(
            num_experts=6,
            moe_intermediate_size=20,
            head_dim=8,
            mlp_only_layers=[],
            norm_topk_prob=False,
        ),
    ),
}
# caps that scores and logits of this size feel. Scores deviate by 2: at 9 a softmax is nearly a
# choice, and what fp32 rounds grows a hundredfold in five steps (docs/concepts/numerics.md)
MODELS["gemma2"] = (
    "gemma2",
    SIZES
    | dict(
        hidden_size=64,
        rope_parameters=ROPE,
        head_dim=12,
        sliding_window=4,
        query_pre_attn_scalar=100,
        attn_logit_softcapping=1.0,
        final_logit_softcapping=2.0,
        tie_word_embeddings=True,
    ),
)
MODELS["mixtral-all"] = "mixtral", MODELS["mixtral"][1] | dict(num_experts_per_tok=4)
LONG = dict(max_position_embeddings=160, sliding_window=70)
MODELS["mistral-blocks"] = "mistral", MODELS["mistral"][1] | LONG
MODELS["qwen3-moe-dense"] = (
    "qwen3_moe",
    MODELS["qwen3-moe"][1] | dict(mlp_only_layers=[0], norm_topk_prob=True),
)
FALCON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    ffn_hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
    rope_parameters=ROPE,
    bos_token_id=None,
    eos_token_id=0,
)
HEADS = dict(hidden_size=48, num_attention_heads=12)  # of ALiBi's slopes 4 are no powers of two
DEEPSEEK = SIZES | dict(
    num_key_value_heads=4,
    kv_lora_rank=12,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
    moe_intermediate_size=20,
    n_routed_experts=8,
    num_experts_per_tok=3,  # 2 groups have the best 2 of all in any case
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.5,
    first_k_dense_replace=1,
    n_shared_experts=2,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=100.0,
        factor=4.0,
        original_max_position_embeddings=8,
        beta_fast=2.0,
        mscale=0.7,
        mscale_all_dim=0.9,
    ),
)
MODELS |= {
    "falcon-7b": ("falcon", FALCON),
    "falcon-40b": (
        "falcon",
        FALCON
        | dict(new_decoder_architecture=True, num_kv_heads=2, bias=True, tie_word_embeddings=False),
    ),
    "falcon-rw": (
        "falcon",
        FALCON | HEADS | dict(alibi=True, multi_query=False, parallel_attn=False, bias=True),
    ),
    "bloom": (
        "bloom",
        dict(
            vocab_size=VOCABULARY,
            hidden_size=48,
            n_layer=2,
            n_head=12,
            bos_token_id=None,
            eos_token_id=0,
        ),
    ),
    "deepseek-v2": (
        "deepseek_v2",
        DEEPSEEK | dict(q_lora_rank=None, attention_bias=True, topk_method="group_limited_greedy"),
    ),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK | dict(q_lora_rank=20)),
}
DATA = {
    "plain": Data(),
    "masked": Data(masked=True),
    "uneven": Data(uneven=True),
    "seed-1": Data(seed=1),
    "long": Data(steps=24, rows=2),
    # attention on a CPU takes 64 queries at once
    "blocks": Data(steps=2, rows=2, length=150),
    "masked-blocks": Data(steps=2, rows=2, length=150, masked=True),
}
WIDE, BOTH = ("float64",), ("float64", "float32")
# Of losses, of norms and router losses, of how far weights have moved, of moments' largest element.
# The worst measured over all rows (docs/concepts/numerics.md) times 200, 200, 8 and 30 in float64,
# for the order of sums is another on another machine; times 6 or more in float32; times 1.7 or more
# in half precision, where 2^-1 is all there is.
TOLERANCE = {
    "float64": (1e-13, 1e-12, 1e-11, 1e-12),
    "float32": (1e-6, 1e-5, 2e-4, 1e-4),
    "bfloat16": (2**-9, 2**-6, 2**-2, 2**-1),
    "float16": (2**-11, 2**-8, 2**-5, 2**-5),
}


@dataclass(frozen=True)
class Row:
    """One run. `train`: options of dolmen's `train` section that must not change the answer;
    `special` and `alike`: how it begins, see trainer.initial; `dtypes`: what dolmen computes in;
    `resume`: it is stopped after so many steps and goes on, with batches of `then` sequences if not
    None; `at_rest`: weights and moments are compared too.
    """

    name: str
    job: Job
    data: str = "plain"
    train: dict[str, Any] = field(default_factory=dict)
    special: dict[int, float] = field(default_factory=dict)
    alike: bool = False
    dtypes: tuple[str, ...] = BOTH
    resume: int | None = None
    then: int | None = None
    at_rest: bool = True

    def __str__(self) -> str:
        return self.name


def row(name: str, model: str = "llama", **changes: Any) -> Row:
    """Of what is not a field of Row, a job is made; of one with a momentum, Muon's."""
    kind, fields = MODELS[model]
    own = {n: changes.pop(n) for n in list(changes) if n in Row.__dataclass_fields__}
    data = DATA[own.get("data", "plain")]
    job = MuonJob if "momentum" in changes else Job
    return Row(name, job(kind, fields, **{"steps": data.steps} | changes), **own)


ACCUMULATE = {"microbatch_size": 2}
EXACT = ACCUMULATE | {"numerics": "exact", "exact": {"tp": 2}}
AUXILIARY = dict(balance_coef=0.05, z_coef=0.05)
BIAS = dict(balance="bias", bias_rate=0.05)
ROWS = [
    # families
    *(row(name, name) for name in MODELS if name not in ("mistral-blocks", "mixtral-all")),
    # the update
    row("adamw-default-eps", eps=1e-8, dtypes=WIDE),
    row("adamw-betas", beta1=0.8, beta2=0.99),
    row("adamw-large-eps", "gpt2", eps=0.1, dtypes=WIDE),
    row("muon", momentum=0.95),
    row("muon-qwen3-moe", "qwen3-moe", momentum=0.9, weight_decay=1.0, dtypes=WIDE),
    row("muon-resumed", "mixtral", momentum=0.95, schedule="cosine", resume=3, dtypes=WIDE),
    row("no-decay", weight_decay=0.0, dtypes=WIDE),
    row("strong-decay", "gpt2", weight_decay=1.0, dtypes=WIDE),
    row("strong-decay-qwen3", "qwen3", weight_decay=1.0, dtypes=WIDE),
    row("no-clip", clip=0.0, dtypes=WIDE),
    row("clip-not-reached", clip=100.0, dtypes=WIDE),
    # schedules
    row("cosine", schedule="cosine", min_lr=1e-3, warmup_steps=2),
    row("linear-decay", schedule="linear", min_lr=1e-3, warmup_steps=1, dtypes=WIDE),
    row("wsd", schedule="wsd", min_lr=1e-3, warmup_steps=1, decay_fraction=0.6, dtypes=WIDE),
    row("warmup", warmup_steps=4, dtypes=WIDE),
    # batches
    row("accumulation", train=ACCUMULATE),
    row("uneven", data="uneven"),
    row("uneven-accumulation", data="uneven", train=ACCUMULATE),
    row("seed-1", data="seed-1"),
    row("exact", data="uneven", train=EXACT, dtypes=("float32", "bfloat16")),
    # masks
    row("masked", data="masked", train=ACCUMULATE),
    row("masked-gpt2", "gpt2", data="masked"),
    row("masked-mistral", "mistral", data="masked"),
    row("masked-qwen2-window", "qwen2-window", data="masked"),
    row("blocks", "mistral-blocks", data="blocks"),
    row("masked-blocks", "mistral-blocks", data="masked-blocks"),
    # experts
    row("balance-loss", "qwen3-moe", balance_coef=0.05),
    row("z-loss", "mixtral", z_coef=0.05),
    row("auxiliary-accumulation", "qwen3-moe", **AUXILIARY, data="uneven", train=ACCUMULATE),
    row("bias-balance", "qwen3-moe", **BIAS, z_coef=0.01),
    row("bias-balance-mixtral", "mixtral", **BIAS, train=ACCUMULATE),
    row("bias-balance-deepseek-v3", "deepseek-v3", **BIAS, dtypes=WIDE),
    row("auxiliary-deepseek-v3", "deepseek-v3", **AUXILIARY, data="masked", dtypes=WIDE),
    row("no-balance", "mixtral", balance="none", balance_coef=0.05),
]


# a step whose batch has the word is not finite, and every other is
NOT_FINITE = dict(data="long", steps=17, special={RARE: float("inf")})
# the gradient of a short row is long, as a norm follows it
SPIKES = dict(spike_factor=1.4, lr=1e-4, data="long", special={RARE: 1e-3})
# a spike is no overflow: the scale grows on
SCALE = dict(loss_scale=2.0**20, patience=3)
ROWS += [
    # policies
    row("not-finite", **NOT_FINITE),
    row("not-finite-bias-balance", "mixtral", **BIAS, **NOT_FINITE, dtypes=WIDE),
    row("spike", **SPIKES, dtypes=WIDE),
    row("spike-loss-scale", **SPIKES, **SCALE, dtypes=WIDE),
    row("spikes-allowed", **SPIKES | dict(spike_factor=None), dtypes=WIDE),
    # resuming
    row("resumed", schedule="cosine", resume=3),
    row("resumed-gpt2", "gpt2", schedule="wsd", warmup_steps=2, resume=2, dtypes=WIDE),
    row("resumed-bias-balance", "qwen3-moe", **BIAS, resume=3, dtypes=WIDE),
    row("resumed-smaller-batches", resume=2, then=4, dtypes=WIDE),
    row("resumed-not-finite", **NOT_FINITE, resume=15, dtypes=WIDE),
    row("resumed-spike", **SPIKES, resume=18, dtypes=WIDE),
    # arithmetic
    row("loss-scale", **SCALE, **NOT_FINITE),
    row("loss-scale-moe", "qwen3-moe", **AUXILIARY, **SCALE),
    row("loss-scale-muon", **SCALE, **NOT_FINITE, momentum=0.95, dtypes=WIDE),
    row("loss-scale-resumed", **SCALE, **NOT_FINITE, resume=15, dtypes=("float32",)),
    row("bfloat16", dtypes=("bfloat16",)),
    row("bfloat16-gpt2", "gpt2", dtypes=("bfloat16",), train=ACCUMULATE),
    # a token takes all experts: of two that are near, rounding chooses otherwise on another CPU
    row("bfloat16-mixtral", "mixtral-all", dtypes=("bfloat16",)),
    # a token between two experts may go to the other: its gradient is no rounding
    row("bfloat16-router", "mixtral", alike=True, lr=1e-6, at_rest=False, dtypes=("bfloat16",)),
    row("bfloat16-masters", lr=1e-5, dtypes=("bfloat16",)),
    row("float16", dtypes=("float16",), loss_scale=2.0**16),
    row("float16-mixtral", "mixtral-all", **AUXILIARY, dtypes=("float16",), loss_scale=2.0**16),
    row(
        "float16-overflow",
        **NOT_FINITE,
        dtypes=("float16",),
        loss_scale=2.0**8,  # doubled twice at most: far from an overflow of its own
        patience=4,
    ),
]


def named(name: str) -> Row:
    return next(r for r in ROWS if r.name == name)
