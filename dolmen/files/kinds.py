"""Schemas and size limits of every kind of file that dolmen reads.

Limits of numbers are far above those of any published model, and far below values that would
exhaust memory or time. A limit without a comment follows from a format's own.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal, NotRequired, get_type_hints

from annotated_types import Interval, Len, MaxLen
from typing_extensions import TypedDict

from dolmen.core.config import AboveZero, Count, NonNegative, Positive
from dolmen.files.gate import MIB, Kind
from dolmen.files.schema import needs, typed_dict

# config.json of transformers. The largest models published have 126 layers (Llama 3.1 405B; DeepNet
# was tried with 1,000), a width of 53,248 inside, 384 experts in a layer, 262,144 tokens and 10 M
# positions.
MOST_LAYERS, MOST_EXPERTS, LARGEST_VOCABULARY = 2**12, 2**14, 2**26
# Layers x experts: the names of so many tensors are made in some seconds. The largest published
# model has 23,424 (61 layers of 384 experts).
MOST_MATRICES = 2**18
LAYERS = Annotated[int, Interval(ge=1, le=MOST_LAYERS)]
LAYER = Annotated[int, Interval(ge=0, le=MOST_LAYERS)]
WIDTH = Annotated[int, Interval(ge=1, le=2**22)]
HEADS = Annotated[int, Interval(ge=1, le=2**16)]
EXPERTS = Annotated[int, Interval(ge=1, le=MOST_EXPERTS)]
VOCABULARY = Annotated[int, Interval(ge=1, le=LARGEST_VOCABULARY)]
POSITIONS = Annotated[int, Interval(ge=1, le=2**40)]
POSITION = Annotated[int, Interval(ge=0, le=2**40)]
TOKEN = Annotated[int, Interval(ge=0, le=2**31 - 1)]
OPTIONAL_TOKEN = Annotated[int | None, Interval(ge=-1, le=2**31 - 1)]  # Llama 1: -1 is none
NAME = Annotated[str, MaxLen(1024)]
SHORT_NAME = Annotated[str, MaxLen(64)]
SHARE = Annotated[float, Interval(gt=0, le=1)]


class SpecialTokenFields(TypedDict, total=False):
    """Special tokens in a config.json and a generation_config.json."""

    bos_token_id: OPTIONAL_TOKEN
    eos_token_id: TOKEN | Annotated[list[TOKEN], MaxLen(1024)] | None
    pad_token_id: OPTIONAL_TOKEN


class SamplingFields(TypedDict, total=False):
    """Fields of a generation_config.json, where it determines sampling."""

    do_sample: bool | None
    temperature: NonNegative | None
    top_k: Count | None
    top_p: SHARE | None
    min_p: Annotated[float, Interval(ge=0, le=1)] | None
    repetition_penalty: AboveZero | None
    max_new_tokens: Positive | None
    min_new_tokens: Count | None


# What else one holds is of its family, which declares its fields (dolmen/families).
CONFIG = Kind(typed_dict({"model_type": NAME}), size=16 * MIB)
GENERATION_CONFIG = Kind(SpecialTokenFields, size=16 * MIB)
SPECIAL_TOKENS = get_type_hints(SpecialTokenFields, include_extras=True)


class AdapterFields(TypedDict):
    """Fields of an adapter_config.json of PEFT that dolmen reads."""

    peft_type: NAME
    r: Annotated[int, Interval(ge=1, le=2**16)]
    lora_alpha: Annotated[float, Interval(gt=0, le=2**24)]
    base_model_name_or_path: NotRequired[NAME | None]
    use_rslora: NotRequired[bool | None]
    use_dora: NotRequired[bool | None]
    bias: NotRequired[NAME]
    target_modules: NotRequired[str | list[NAME] | None]
    exclude_modules: NotRequired[str | list[NAME] | None]
    layers_to_transform: NotRequired[LAYER | list[LAYER] | None]
    layers_pattern: NotRequired[NAME | list[NAME] | None]
    init_lora_weights: NotRequired[bool | NAME | None]
    lora_dropout: NotRequired[Annotated[float, Interval(ge=0, le=1)] | None]


ADAPTER_CONFIG = Kind(AdapterFields, size=MIB)


# safetensors. An index names 140,000 tensors for the largest models with experts, 15 MB.
INDEX = Kind(
    typed_dict({"weight_map": dict[str, Annotated[str, MaxLen(255)]]}), size=256 * MIB, depth=8
)


STORED = typed_dict(
    {
        "dtype": NAME,
        "shape": Annotated[list[Annotated[int, Interval(ge=0, le=2**48)]], MaxLen(64)],
        "data_offsets": tuple[Count, Count],
    },
    rest=None,
)
HEADER = Kind(typed_dict({}, {"__metadata__": dict[str, str]}, STORED), size=100 * MIB, depth=3)

# A tokenizer. The largest tokenizer.json (262,144 tokens with their merges) has 34 MB.
SPELLED = typed_dict({"content": str})
SPECIAL = str | SPELLED | None
ADDED = typed_dict({"content": str, "id": TOKEN})
TOKENIZER_MODEL = typed_dict(
    {},
    {
        "type": NAME,
        "vocab": dict[str, TOKEN] | list[tuple[str, float]],
        "merges": list[str | tuple[str, str]],
    },
)
TOKENIZER = Kind(
    typed_dict({"model": TOKENIZER_MODEL}, {"added_tokens": list[ADDED]}), size=256 * MIB
)
TOKENIZER_CONFIG = Kind(
    typed_dict(
        {},
        {
            "tokenizer_class": NAME | None,
            "added_tokens_decoder": dict[str, SPELLED],
            **{f"{name}_token": SPECIAL for name in ("bos", "eos", "unk", "pad", "sep", "cls")},
        },
    ),
    size=64 * MIB,
)
SPECIAL_TOKENS_MAP = Kind(dict[str, str | list[SPECIAL] | dict[str, Any] | None])
ADDED_TOKENS = Kind(dict[str, TOKEN])
VOCAB = Kind(dict[str, TOKEN], size=64 * MIB, depth=1)
TOKENIZER_FILES = {
    "tokenizer.json": TOKENIZER,
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "special_tokens_map.json": SPECIAL_TOKENS_MAP,
    "added_tokens.json": ADDED_TOKENS,
    "vocab.json": VOCAB,
    "chat_template.json": Kind(dict[str, Any]),
    "tekken.json": Kind(dict[str, Any], size=64 * MIB),
    # transformers makes a list as long as these, to learn what tokenizer a model has
    "config.json": Kind(
        typed_dict({}, dict.fromkeys(("num_hidden_layers", "n_layer"), LAYER | None))
    ),
}

# Written by dolmen, and read again.
STATE_JSON = Kind(dict[str, Any], size=64 * MIB, constants=True)  # of any checkpoint
LOSS_SCALE = tuple[AboveZero, Count]
STORED_RUN = typed_dict(
    {"model": dict[str, Any], "train": typed_dict({"global_batch_size": Positive})},
    {"optimizer": typed_dict({}, {"name": str})},
)
CRITIC = typed_dict(
    {
        "updates": Count,
        "loss_scale": LOSS_SCALE,
        "norms": list[NonNegative],
        "kl_coef": NonNegative,
    },
    rest=None,
)
VALIDATION = typed_dict(
    {
        "step": Count,
        "loss": float,
        "tokens": Count,
        "held_out_tokens": Count,
        "bits_per_byte": float | None,
    },
    dict.fromkeys(("sources", "sources_per_byte", "sources_before"), dict[str, float]),
    rest=None,
)


STATE = Kind(
    typed_dict(
        {
            "run": STORED_RUN,
            **dict.fromkeys(("step", "tokens", "updates", "samples"), Count),
            "data": dict[str, str],
            "loss_scale": LOSS_SCALE,
            "inherited": Annotated[int, Interval(ge=-(2**40), le=2**40)],
            "seconds": NonNegative,
            "norms": list[NonNegative],
            "critic": CRITIC | None,
            "validation": VALIDATION | None,
        }
    ),
    size=64 * MIB,
)


class MetricsFields(TypedDict):
    """A row of metrics.jsonl."""

    step: Count
    loss: NotRequired[float | None]
    val_loss: NotRequired[float | None]
    tokens: NotRequired[Count]
    lr: NotRequired[float]


METRICS_ROW = Kind(Annotated[MetricsFields, needs(loss="tokens lr")], size=MIB, depth=4)


class ReceiptFields(TypedDict):
    """A row of receipts.jsonl."""

    step: Count
    loss: str
    grad_norm: str
    receipt: str
    operators: dict[str, str]
    weights: dict[str, dict[str, str]]


RECEIPT_ROW = Kind(ReceiptFields, size=64 * MIB, depth=4)


class SampleFields(TypedDict):
    """A row of samples.jsonl: what a model wrote of a prompt after so many steps of training."""

    step: Count
    prompt: str
    text: str
    time: NotRequired[NonNegative]
    tokens: NotRequired[Count]


SAMPLE_ROW = Kind(SampleFields, size=MIB, depth=4)


class RolloutFields(TypedDict):
    """A row of rollouts/completions.jsonl: a completion of a rollout iteration."""

    step: Count
    prompt: str
    completion: str
    tokens: Count
    finished: bool
    reward: NotRequired[float]


ROLLOUT_COMPLETION_ROW = Kind(RolloutFields, size=16 * MIB, depth=4)


LOADS = Annotated[list[NonNegative], Len(1, MOST_EXPERTS)]
HISTORY_ROW = Kind(
    typed_dict(
        {"step": Count, "time": NonNegative},
        {
            "begun": Literal["new", "resumed", "restarted"],
            **dict.fromkeys(("steps", "reached", "parameters"), Count),
            "run_id": SHORT_NAME,
            "processes": Positive,
            **dict.fromkeys(("device", "ended"), NAME),
            "changed": Annotated[list[Annotated[str, MaxLen(4096)]], MaxLen(1024)],
            "memory_gib": list[NonNegative],
            "router_load": Annotated[dict[str, LOADS], MaxLen(MOST_LAYERS)],
            "saved": bool,
        },
    ),
    size=64 * MIB,  # the largest published model has 23,424 experts
    depth=4,
)


class SummaryFields(TypedDict, closed=True):
    """A run's summary.json, the fields of `Outcome` (training/run.py)."""

    steps: Count
    signal: Count
    seconds: NonNegative | None
    val_loss: float | None
    val_step: Count | None
    val_tokens: Count
    held_out_tokens: Count
    bits_per_byte: float | None
    validation_files: list[str]
    val_sources: dict[str, float]
    val_sources_per_byte: dict[str, float]
    val_sources_before: dict[str, float]
    goodput: dict[str, NonNegative]
    slow_ranks: dict[str, NonNegative]
    writer: str


SUMMARY = Kind(SummaryFields, depth=4)
SUMS = Kind(
    typed_dict({"files": dict[str, str], "digest": str}), size=64 * MIB, depth=2
)  # files/storage.py


class GoodputFields(TypedDict):
    """Seconds of a run by phase, training/goodput.py."""

    until: NonNegative
    reached: Count
    seconds: dict[str, NonNegative]
    slow: dict[str, NonNegative]


GOODPUT = Kind(GoodputFields, depth=4)
# milliseconds of attention backends, by shape (training/attention_timing.py)
ATTENTION_TIMES = Kind(dict[NAME, dict[SHORT_NAME, AboveZero]], size=MIB, depth=2)
TextFile = tuple[str, Count, int, int]  # path, size, times of modification and change


class IndexFields(TypedDict):
    """Index of any tokenised data set."""

    format: int
    files: list[TextFile]
    tokens: Count
    content: str
    vocabulary: Count
    largest: Count
    sizes: dict[str, Count]
    digests: dict[str, str]
    digest: str


class TokenizedFields(IndexFields):
    """Index of a data set that dolmen tokenised."""

    hubs: list[tuple[str, Count, list[TextFile]]]
    tokenizer: str
    dtype: Literal["<u2", "<u4"]


class CorpusFields(TokenizedFields):
    """Index of tokenised documents."""

    text_field: str
    end_of_text: TOKEN
    documents: Count
    bytes: Count
    different: Count


class ExamplesFields(TokenizedFields):
    """Index of tokenised examples of fine-tuning."""

    template: str
    train_on: str
    examples: Count
    trained: Count
    untrained: Count


class MegatronIndexFields(IndexFields):
    """Index of what we know of a data set of Megatron."""

    end_of_text: TOKEN
    documents: Count
    different: Count
    unended: Count


CORPUS = Kind(CorpusFields, size=1024 * MIB, depth=8)  # of a million files
EXAMPLES = Kind(ExamplesFields, size=1024 * MIB, depth=8)
INDEXED = Kind(MegatronIndexFields, depth=8)


class ChatMessageFields(TypedDict):
    """A message of a chat."""

    role: SHORT_NAME
    content: str | None


# A chat, in one of three forms, distinguished by their fields.
MESSAGES = Annotated[list[ChatMessageFields], Len(1)]
SHARED = Annotated[list[typed_dict({"from": SHORT_NAME, "value": str | None})], Len(1)]
# Of what is multiplied with losses: float32, in which that is, ends at 3.4e38.
TIMES_A_LOSS = 1e30
WEIGHT = Annotated[float | None, Interval(ge=0, le=TIMES_A_LOSS)]
CHAT_EXTRAS = {"weight": WEIGHT, "system": str | None}
CHAT_ROWS = {
    "messages": typed_dict({"messages": MESSAGES}, CHAT_EXTRAS),
    "conversations": typed_dict({"conversations": SHARED}, CHAT_EXTRAS),
    "instruction": typed_dict(
        {"instruction": str, "output": str}, {"input": str | None, **CHAT_EXTRAS}
    ),
}
PAIR_ROW = typed_dict(
    {"chosen": str | MESSAGES, "rejected": str | MESSAGES},
    {
        "prompt": str | MESSAGES,
        "system": str,
        "margin": Annotated[float, Interval(ge=-TIMES_A_LOSS, le=TIMES_A_LOSS)],
    },
)
COMPLETION_ROW = typed_dict(
    {"completion": str | MESSAGES, "label": bool | Annotated[int, Interval(ge=0, le=1)]},
    {"prompt": str | MESSAGES, "system": str},
)
# A row to answer, in one of three forms; what else it has is carried along.
NAMED = {"id": NAME | int, "adapter": Annotated[str | None, MaxLen(1024)]}
PROMPT_ROWS = {
    "prompt": typed_dict({"prompt": str}, NAMED),
    "query": typed_dict({"query": str}, NAMED),
    "messages": typed_dict({"messages": MESSAGES}, NAMED),
}
# The body of a client's request, which serving/http/protocol.py checks further; and the arguments
# of a function call in one of its messages.
REQUEST_BODY = Kind(dict[str, Any], depth=64)
ARGUMENTS = Kind(dict[str, Any], depth=64)
# Journal of an unfinished output (serving/output_file.py): the options, then rows that wait.
JOURNAL_HEAD = Kind(
    typed_dict(
        {"format": Annotated[int, Interval(ge=1, le=1)], "options": dict[str, Any], "input": str},
        rest=None,
    )
)
JOURNAL_ROW = Kind(
    typed_dict({"row": Count, "answer": dict[str, Any]}, rest=None),
    size=1024 * MIB,
    depth=80,
    constants=True,
)
JOURNAL_LINE = replace(JOURNAL_ROW, schema=JOURNAL_HEAD.schema | JOURNAL_ROW.schema)
# a chat template of Jinja: the longest published ones have some 20,000 characters
TEMPLATE_SIZE = MIB
# Beside a model that was given more tokens.
EXTENDED = Kind(typed_dict({"old_tokens": TOKEN, "tokens": TOKEN}), depth=4)
DIST_MARKER = Kind(
    typed_dict({"sharded_backend": NAME}, {"sharded_backend_version": int}), size=MIB, depth=4
)
HEARTBEAT = Kind(typed_dict({}, {"step": Count, "tick": Count, "pid": Positive}), depth=8)
STACKS_BYTES = 64 * MIB  # what faulthandler writes, as text
WORKER_ERROR = Kind(
    typed_dict({"text": str, "when": float}, {"final": bool, "hang": bool}), depth=2
)

# Written by people. The fields of a run are those of RunConfig, which core/config.py:from_dict
# compares one by one; here stands what every one of them is made of.
RUN = Kind(dict[str, Any] | None, size=4 * MIB)
SCHEDULE = Kind(
    typed_dict({"actions": Annotated[list[str], Len(1)]}, {"placement": str}, rest=None),
    size=8 * MIB,  # 64 ranks of 6,144 actions each have 3 MB
    depth=2,
)
# Times of a pipeline's actions, of every stage or one for all.
TIME = Annotated[float, Interval(gt=0, le=2**40)]
SEND = Annotated[float, Interval(ge=0, le=2**40)]
TIMES = TIME | Annotated[list[TIME], Len(1, 2**16)]
COSTS = Kind(
    Annotated[
        typed_dict(
            {"forward": TIMES},
            {
                **dict.fromkeys(("backward", "input", "weight"), TIMES),
                "send": SEND | Annotated[list[SEND], Len(1, 2**16)],
            },
            rest=None,
        ),
        needs(input="weight", weight="input"),
    ],
    depth=2,
)
# A row of text: its other fields are nobody's business, and Python writes NaN into them.
TEXT_ROW = Kind(dict[str, Any], size=256 * MIB, depth=64, constants=True)

# A device and a cluster, written by people too (planning/hardware.py). Bounds keep out what is in
# another unit: no device of 2026 has 10 TB/s per GB, or a share above 1.
MICROSECONDS = Annotated[float, Interval(ge=0, le=10_000)]
GB_S = Annotated[float, Interval(gt=0, le=1_000_000)]
GPUS = Annotated[int, Interval(ge=1, le=10_000)]
NODES = Annotated[int, Interval(ge=1, le=1_000_000)]
SOURCES = dict[str, str]
EFFICIENCY = typed_dict(
    {
        **dict.fromkeys(("product", "attention", "memory"), SHARE),
        "variation": Annotated[float, Interval(ge=0, le=0.2)],
    },
    {"fp8": SHARE, "tuned": SHARE},
    rest=None,
)
DEVICE = Kind(
    typed_dict(
        {
            "peak_tflops": dict[str, Annotated[float, Interval(gt=0, le=100_000)]],
            "memory_gib": Annotated[float, Interval(gt=0, le=10_000)],
            "memory_gb_s": GB_S,
            "multiprocessors": GPUS,
            "efficiency": EFFICIENCY,
            "launch_us": MICROSECONDS,
            "host_us": MICROSECONDS,
            "host_gb_s": GB_S,
            "reserved_gib": Annotated[float, Interval(ge=0, le=1_000)],
            "sources": SOURCES,
        },
        {"watts": Annotated[float, Interval(gt=0, le=100_000)]},
        rest=None,
    ),
    size=MIB,
    depth=4,
)
LINK = typed_dict(
    {"gb_s": GB_S, "latency_us": MICROSECONDS, "share": SHARE},
    {"peers": Annotated[int, Interval(ge=1, le=1152)]},
    rest=None,
)
TIER = typed_dict(
    {
        "name": NAME,
        "nodes": NODES,
        "oversubscription": Annotated[float, Interval(ge=1, le=1_000)],
        "latency_us": MICROSECONDS,
    },
    rest=None,
)
CLUSTER = Kind(
    typed_dict(
        {"device": NAME, "gpus_per_node": GPUS, "nodes": NODES, "inside": LINK, "sources": SOURCES},
        {
            "between": LINK,
            "tiers": Annotated[list[TIER], MaxLen(16)],
            "storage_gb_s": GB_S,
            "node_kw": Annotated[float, Interval(gt=0, le=10_000)],
        },
        rest=None,
    ),
    size=MIB,
    depth=5,
)
PREDICTION_ERROR = tuple[NAME, NAME, NAME, Annotated[float, Interval(ge=-10, le=10)]]
PREDICTION_ERRORS = Kind(typed_dict({"errors": list[PREDICTION_ERROR]}, rest=None), depth=4)

# What `dolmen dryrun --json` writes, and a plan keeps of its first layout (planning/winner.py).
SENT = typed_dict({"axis": NAME, "op": NAME, "count": Count, "bytes": Count}, rest=None)
RANK = typed_dict(
    {
        **dict.fromkeys(("rank", "peak_bytes", "flops"), Count),
        "live_bytes": dict[str, int],
        "collectives": list[SENT],
    },
    rest=None,
)
DRYRUN = Kind(typed_dict({"ranks": list[RANK]}, rest=None), size=MIB, depth=6)
