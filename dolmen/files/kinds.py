"""Schemas and size limits of every kind of file that dolmen reads.

Limits of numbers are far above those of any published model, and far below values that would
exhaust memory or time. A limit without a comment follows from a format's own.
"""

from dataclasses import replace

from dolmen.files.gate import MIB, Kind
from dolmen.files.schema import (
    Flag,
    Int,
    List,
    Map,
    Null,
    Object,
    Real,
    String,
    TupleOf,
    either,
    optional,
)

# config.json of transformers. The largest models published have 126 layers (Llama 3.1 405B; DeepNet
# was tried with 1,000), a width of 53,248 inside, 384 experts in a layer, 262,144 tokens and 10 M
# positions.
LAYERS = Int(1, 2**12)
WIDTH = Int(1, 2**22)
HEADS = Int(1, 2**16)
EXPERTS = Int(1, 2**14)
# Layers x experts: the names of so many tensors are made in some seconds. The largest published
# model has 23,424 (61 layers of 384 experts).
MOST_MATRICES = 2**18
VOCABULARY = Int(1, 2**26)
POSITIONS = Int(1, 2**40)
TOKEN = Int(0, 2**31 - 1)
NAME = String(longest=1024)
SPECIAL_TOKENS = {
    "bos_token_id": optional(Int(-1, TOKEN.high)),
    "eos_token_id": either(Null(), TOKEN, List(TOKEN, longest=1024)),
    "pad_token_id": optional(Int(-1, TOKEN.high)),  # Llama 1 says -1 for none
}
# Of a generation_config.json, where tokens are chosen as it says.
SAMPLING = Object(
    optional={
        "do_sample": optional(Flag()),
        "temperature": optional(Real(0)),
        "top_k": optional(Int(0)),
        "top_p": optional(Real(0, 1, above=True)),
        "min_p": optional(Real(0, 1)),
        "repetition_penalty": optional(Real(0, above=True)),
        "max_new_tokens": optional(Int(1)),
        "min_new_tokens": optional(Int(0)),
    }
)
# What else one holds is of its family, which declares its fields (dolmen/families).
CONFIG = Kind(Object(required={"model_type": NAME}), size=16 * MIB)
GENERATION_CONFIG = Kind(Object(optional=SPECIAL_TOKENS), size=16 * MIB)

# Of adapters as PEFT writes them, what we read.
LAYER = Int(0, LAYERS.high)
ADAPTER_CONFIG = Kind(
    Object(
        required={
            "peft_type": NAME,
            "r": Int(1, 2**16),
            "lora_alpha": Real(0, 2**24, above=True),
        },
        optional={
            "base_model_name_or_path": optional(NAME),
            "use_rslora": optional(Flag()),
            "use_dora": optional(Flag()),
            "bias": NAME,
            "target_modules": either(Null(), String(), List(NAME)),
            "exclude_modules": either(Null(), String(), List(NAME)),
            "layers_to_transform": either(Null(), LAYER, List(LAYER)),
            "layers_pattern": either(Null(), NAME, List(NAME)),
            "init_lora_weights": either(Null(), Flag(), NAME),
            "lora_dropout": optional(Real(0, 1)),
        },
    ),
    size=MIB,
)

# safetensors. An index names 140,000 tensors for the largest models with experts, 15 MB.
INDEX = Kind(Object(required={"weight_map": Map(String(longest=255))}), size=256 * MIB, depth=8)
STORED = Object(
    required={
        "dtype": NAME,
        "shape": List(Int(0, 2**48), longest=64),
        "data_offsets": TupleOf((Int(0), Int(0))),
    },
    rest=None,
)
HEADER = Kind(
    Object(optional={"__metadata__": Map(String())}, rest=STORED), size=100 * MIB, depth=3
)

# A tokenizer. The largest tokenizer.json (262,144 tokens with their merges) has 34 MB.
SPECIAL = either(Null(), String(), Object(required={"content": String()}))
ADDED = Object(required={"content": String(), "id": TOKEN})
TOKENIZER = Kind(
    Object(
        required={
            "model": Object(
                optional={
                    "type": NAME,
                    "vocab": either(Map(TOKEN), List(TupleOf((String(), Real())))),
                    "merges": List(either(String(), TupleOf((String(), String())))),
                }
            )
        },
        optional={"added_tokens": optional(List(ADDED))},
    ),
    size=256 * MIB,
)
TOKENIZER_CONFIG = Kind(
    Object(
        optional={
            "tokenizer_class": optional(NAME),
            "added_tokens_decoder": Map(Object(required={"content": String()})),
            **{f"{name}_token": SPECIAL for name in ("bos", "eos", "unk", "pad", "sep", "cls")},
        }
    ),
    size=64 * MIB,
)
SPECIAL_TOKENS_MAP = Kind(Map(either(*SPECIAL.kinds, List(SPECIAL), Map())))
ADDED_TOKENS = Kind(Map(TOKEN))
VOCAB = Kind(Map(TOKEN), size=64 * MIB, depth=1)
# transformers makes a list as long as these of any config.json, to learn what tokenizer it has
TOKENIZER_MODEL = Kind(
    Object(
        optional={n: optional(Int(0, LAYERS.high)) for n in ("num_hidden_layers", "n_layer")},
    )
)
TOKENIZER_FILES = {
    "tokenizer.json": TOKENIZER,
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "special_tokens_map.json": SPECIAL_TOKENS_MAP,
    "added_tokens.json": ADDED_TOKENS,
    "vocab.json": VOCAB,
    "chat_template.json": Kind(Map()),
    "tekken.json": Kind(Object(), size=64 * MIB),
    "config.json": TOKENIZER_MODEL,
}

# Written by dolmen, and read again.
STATE_JSON = Kind(Object(), size=64 * MIB, constants=True)  # of any checkpoint
STATE = Kind(  # of a run's
    Object(
        required={
            "run": Object(
                required={
                    "model": Object(),
                    "train": Object(required={"global_batch_size": Int(1)}),
                },
                optional={"optimizer": Object(optional={"name": String()})},
            ),
            "step": Int(0),
            "tokens": Int(0),
            "updates": Int(0),
            "data": Map(String()),
            "loss_scale": TupleOf((Real(0, above=True), Int(0))),
            "inherited": Int(-(2**40), 2**40),
            "samples": Int(0),
            "seconds": Real(0),
            "norms": List(Real(0)),
            "critic": optional(
                Object(
                    required={
                        "updates": Int(0),
                        "loss_scale": TupleOf((Real(0, above=True), Int(0))),
                        "norms": List(Real(0)),
                        "kl_coef": Real(0),
                    },
                    rest=None,
                )
            ),
            "validation": optional(
                Object(
                    required={
                        "step": Int(0),
                        "loss": Real(),
                        "tokens": Int(0),
                        "held_out_tokens": Int(0),
                        "bits_per_byte": optional(Real()),
                    },
                    optional={
                        "sources": Map(Real()),
                        "sources_per_byte": Map(Real()),
                        "sources_before": Map(Real()),
                    },
                    rest=None,
                )
            ),
        },
    ),
    size=64 * MIB,
)
METRICS_ROW = Kind(
    Object(
        required={"step": Int(0)},
        optional={
            "loss": optional(Real()),
            "val_loss": optional(Real()),
            "tokens": Int(0),
            "lr": Real(),
        },
        needs={"loss": ("tokens", "lr")},
    ),
    size=MIB,
    depth=4,
)
# What a model wrote of a prompt after so many steps of its training: samples.jsonl.
SAMPLE_ROW = Kind(
    Object(
        required={"step": Int(0), "prompt": String(), "text": String()},
        optional={"time": Real(0), "tokens": Int(0)},
    ),
    size=MIB,
    depth=4,
)
# A completion of a rollout iteration: rollouts/completions.jsonl.
ROLLOUT_COMPLETION_ROW = Kind(
    Object(
        required={
            "step": Int(0),
            "prompt": String(),
            "completion": String(),
            "tokens": Int(0),
            "finished": Flag(),
        },
        optional={"reward": Real()},
    ),
    size=16 * MIB,
    depth=4,
)
HISTORY_ROW = Kind(
    Object(
        required={"step": Int(0), "time": Real(0)},
        optional={
            "begun": String(choices=("new", "resumed", "restarted")),
            "steps": Int(0),
            "reached": Int(0),
            "run_id": String(longest=64),
            "processes": Int(1),
            "device": String(longest=1024),
            "parameters": Int(0),
            "changed": List(String(longest=4096), longest=1024),
            "memory_gib": List(Real(0)),
            "router_load": Map(List(Real(0), shortest=1, longest=EXPERTS.high), LAYERS.high),
            "saved": Flag(),
            "ended": String(longest=1024),
        },
    ),
    size=64 * MIB,  # the largest published model has 23,424 experts
    depth=4,
)
SUMMARY = Kind(
    Object(
        required={
            "steps": Int(0),
            "seconds": optional(Real(0)),
            "val_loss": optional(Real()),
            "val_step": optional(Int(0)),
            "val_tokens": Int(0),
            "held_out_tokens": Int(0),
            "bits_per_byte": optional(Real()),
            "validation_files": List(String()),
        },
        optional={
            "val_sources": Map(Real()),
            "val_sources_per_byte": Map(Real()),
            "val_sources_before": Map(Real()),
        },
    ),
    depth=4,
)
TEXT_FILE = TupleOf(
    (String(), Int(0), Int(), Int())
)  # path, size, times of modification and change
READ_FROM = {
    "format": Int(),
    "files": List(TEXT_FILE),
    "hubs": List(TupleOf((String(), Int(0), List(TEXT_FILE)))),
    "tokenizer": String(),
}
CORPUS = Kind(
    Object(
        required={
            **READ_FROM,
            "text_field": String(),
            "end_of_text": TOKEN,
            "dtype": String(choices=("<u2", "<u4")),
            "tokens": Int(0),
            "documents": Int(0),
            "bytes": Int(0),
            "different": Int(0),
            "content": String(),
            "vocabulary": Int(0),
            "largest": Int(0),
            "sizes": Map(Int(0)),
            "digests": Map(String()),
            "digest": String(),
        }
    ),
    size=1024 * MIB,  # of a million files
    depth=8,
)
# A chat, in one of three forms, which their fields tell apart.
SPOKEN = List(
    Object(required={"role": String(longest=64), "content": optional(String())}), shortest=1
)
SHARED = List(
    Object(required={"from": String(longest=64), "value": optional(String())}), shortest=1
)
# Of what is multiplied with losses: float32, in which that is, ends at 3.4e38.
TIMES_A_LOSS = 1e30
BESIDE = {"weight": optional(Real(0, TIMES_A_LOSS)), "system": optional(String())}
CHAT_ROWS = {
    "messages": Object(required={"messages": SPOKEN}, optional=BESIDE),
    "conversations": Object(required={"conversations": SHARED}, optional=BESIDE),
    "instruction": Object(
        required={"instruction": String(), "output": String()},
        optional={"input": optional(String()), **BESIDE},
    ),
}
PAIR_ROW = Object(
    required={name: either(String(), SPOKEN) for name in ("chosen", "rejected")},
    optional={
        "prompt": either(String(), SPOKEN),
        "system": String(),
        "margin": Real(-TIMES_A_LOSS, TIMES_A_LOSS),
    },
)
COMPLETION_ROW = Object(
    required={"completion": either(String(), SPOKEN), "label": either(Flag(), Int(0, 1))},
    optional={"prompt": either(String(), SPOKEN), "system": String()},
)
# A row to answer, in one of three forms; what else it has is carried along.
NAMED = {"id": either(String(longest=1024), Int()), "adapter": optional(NAME)}
PROMPT_ROWS = {
    "prompt": Object(required={"prompt": String()}, optional=NAMED),
    "query": Object(required={"query": String()}, optional=NAMED),
    "messages": Object(required={"messages": SPOKEN}, optional=NAMED),
}
# What a client of a server says, which its protocol compares further (serving/http/protocol.py);
# and with what a function was called that it tells of.
ASKED = Kind(Object(), depth=64)
ARGUMENTS = Kind(Object(), depth=64)
# Journal of an unfinished output (serving/output_file.py): the options, then rows that wait.
JOURNAL_HEAD = Kind(
    Object(required={"format": Int(1, 1), "asked": Map(), "input": String()}, rest=None)
)
JOURNAL_ROW = Kind(
    Object(required={"row": Int(0), "answer": Object()}, rest=None),
    size=1024 * MIB,
    depth=80,
    constants=True,
)
JOURNAL_LINE = replace(JOURNAL_ROW, schema=either(JOURNAL_HEAD.schema, JOURNAL_ROW.schema))
# a chat template of Jinja: the longest published ones have some 20,000 characters
TEMPLATE_SIZE = MIB
EXAMPLES = Kind(
    Object(
        required={
            **READ_FROM,
            "template": String(),
            "train_on": String(),
            "dtype": String(choices=("<u2", "<u4")),
            "examples": Int(0),
            "tokens": Int(0),
            "trained": Int(0),
            "untrained": Int(0),
            "content": String(),
            "vocabulary": Int(0),
            "largest": Int(0),
            "sizes": Map(Int(0)),
            "digests": Map(String()),
            "digest": String(),
        }
    ),
    size=1024 * MIB,
    depth=8,
)
# Beside a model that was given more tokens.
EXTENDED = Kind(Object(required={"old_tokens": TOKEN, "tokens": TOKEN}), depth=4)
DIST_MARKER = Kind(
    Object(required={"sharded_backend": NAME}, optional={"sharded_backend_version": Int()}),
    size=MIB,
    depth=4,
)
INDEXED = Kind(
    Object(
        required={
            "format": Int(),
            "files": List(TEXT_FILE),
            "end_of_text": TOKEN,
            "vocabulary": Int(0),
            "tokens": Int(0),
            "largest": Int(0),
            "documents": Int(0),
            "different": Int(0),
            "unended": Int(0),
            "content": String(),
            "sizes": Map(Int(0)),
            "digests": Map(String()),
            "digest": String(),
        }
    ),
    depth=8,
)
HEARTBEAT = Kind(Object(optional={"step": Int(0), "tick": Int(0), "pid": Int(1)}), depth=8)
STACKS_BYTES = 64 * MIB  # what faulthandler writes, as text
WORKER_ERROR = Kind(Object(required={"message": Map()}), depth=8)

# Written by people. The fields of a run are those of RunConfig, which core/config.py:from_dict
# compares one by one; here stands what every one of them is made of.
RUN = Kind(optional(Map()), size=4 * MIB)
SCHEDULE = Kind(
    Object(
        required={"actions": List(String(), shortest=1)},
        optional={"placement": String()},
        rest=None,
    ),
    size=8 * MIB,  # 64 ranks of 6,144 actions each have 3 MB
    depth=2,
)
# Times of a pipeline's actions, of every stage or one for all.
TIMES = either(Real(0, 2**40, above=True), List(Real(0, 2**40, above=True), 1, 2**16))
COSTS = Kind(
    Object(
        required={"forward": TIMES},
        optional={
            "backward": TIMES,
            "input": TIMES,
            "weight": TIMES,
            "send": either(Real(0, 2**40), List(Real(0, 2**40), 1, 2**16)),
        },
        rest=None,
        needs={"input": ("weight",), "weight": ("input",)},
    ),
    depth=2,
)
# A row of text: its other fields are nobody's business, and Python writes NaN into them.
TEXT_ROW = Kind(Object(), size=256 * MIB, depth=64, constants=True)

# A device and a cluster, written by people too (planning/hardware.py). Bounds keep out what is in
# another unit: no device of 2026 has 10 TB/s per GB, or a share above 1.
SHARE = Real(0, 1, above=True)
MICROSECONDS = Real(0, 10_000)
GB_S = Real(0, 1_000_000, above=True)
SOURCES = Map(String())
DEVICE = Kind(
    Object(
        required={
            "peak_tflops": Map(Real(0, 100_000, above=True)),
            "memory_gib": Real(0, 10_000, above=True),
            "memory_gb_s": GB_S,
            "multiprocessors": Int(1, 10_000),
            "efficiency": Object(
                required={
                    "product": SHARE,
                    "attention": SHARE,
                    "memory": SHARE,
                    "variation": Real(0, 0.2),
                },
                optional={"fp8": SHARE, "tuned": SHARE},
                rest=None,
            ),
            "launch_us": MICROSECONDS,
            "host_us": MICROSECONDS,
            "host_gb_s": GB_S,
            "reserved_gib": Real(0, 1_000),
            "sources": SOURCES,
        },
        optional={"watts": Real(0, 100_000, above=True)},
        rest=None,
    ),
    size=MIB,
    depth=4,
)
LINK = Object(
    required={"gb_s": GB_S, "latency_us": MICROSECONDS, "share": SHARE},
    optional={"peers": Int(1, 1152)},
    rest=None,
)
CLUSTER = Kind(
    Object(
        required={
            "device": String(longest=1024),
            "gpus_per_node": Int(1, 10_000),
            "nodes": Int(1, 1_000_000),
            "inside": LINK,
            "sources": SOURCES,
        },
        optional={
            "between": LINK,
            "tiers": List(
                Object(
                    required={
                        "name": NAME,
                        "nodes": Int(1, 1_000_000),
                        "oversubscription": Real(1, 1_000),
                        "latency_us": MICROSECONDS,
                    },
                    rest=None,
                ),
                longest=16,
            ),
            "storage_gb_s": GB_S,
            "node_kw": Real(0, 10_000, above=True),
        },
        rest=None,
    ),
    size=MIB,
    depth=5,
)
PREDICTION_ERRORS = Kind(
    Object(
        required={"errors": List(TupleOf((String(longest=1024), NAME, NAME, Real(-10, 10))))},
        rest=None,
    ),
    depth=4,
)

BYTES = Int(0)

# What `dolmen dryrun --json` writes, and a plan keeps of its first layout (planning/winner.py).
SENT = Object(required={"axis": NAME, "op": NAME, "count": BYTES, "bytes": BYTES}, rest=None)
RANK = Object(
    required={
        "rank": BYTES,
        "peak_bytes": BYTES,
        "live_bytes": Map(Int()),
        "flops": BYTES,
        "collectives": List(SENT),
    },
    rest=None,
)
DRYRUN = Kind(Object(required={"ranks": List(RANK)}, rest=None), size=MIB, depth=6)
