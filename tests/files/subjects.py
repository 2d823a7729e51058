"""Each kind of file that is read from outside: an undamaged one, its reader, and what the reader
may give for a damaged one.

A kind under a digest must give the undamaged values or refuse. Of a kind that people write, or that
has no checksum, another value that fits the schema is what the file says: it must be exactly what
another, plain parser finds in the same bytes.
"""

import json
import math
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import yaml
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.distributed.checkpoint import metadata as dcp

from dolmen.checkpoint import metadata, seal
from dolmen.checkpoint.store import Checkpoints
from dolmen.conversion import hf
from dolmen.core.config import from_dict, to_dict
from dolmen.core.mesh import SINGLE
from dolmen.core.torch_private.checkpoints import Place
from dolmen.data import corpus, readers, token_cache
from dolmen.families import ModelConfig, find_family
from dolmen.files import gate, indexed, kinds, tokenizer_files, torch_files
from dolmen.files import safetensors as ours
from dolmen.files.schema import check_value
from dolmen.files.write import Tail
from dolmen.parallel import schedule, simulation
from dolmen.recipes import RECIPES
from dolmen.serving import engine
from dolmen.training import metrics
from dolmen.training.config import RunConfig
from dolmen.training.request import read_run


@dataclass(frozen=True)
class Subject:
    """`make(folder)` writes the undamaged file, and what it needs beside it, and gives its path.
    `read(file)` is what is tested. `same(value, undamaged, file)`: whether the value of a damaged
    file is one that may be.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    same: Callable[[Any, Any, Path], bool]


def equal(value: Any, undamaged: Any, file: Path) -> bool:
    """Of files under a digest."""
    return value == undamaged


def writes(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def plain(file: Path) -> Any:
    return json.loads(file.read_bytes().decode("utf-8-sig"))


def alike(a: Any, b: Any) -> bool:
    """Equal in values and types; NaN is NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def said(shape: Any, what=plain) -> Callable[[Any, Any, Path], bool]:
    """Of files that people write: what stands there, if it fits `shape`."""

    def same(value: Any, undamaged: Any, file: Path) -> bool:
        check_value(value, shape)
        return alike(value, what(file))

    return same


def json_subject(name: str, kind: gate.Kind, content: Any) -> Subject:
    text = json.dumps(content, indent=1).encode()
    return Subject(writes(name, text), lambda file: gate.read_json(file, kind), said(kind.schema))


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": [1, 2],
    "dtype": "float32",
}
ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}
CONFIGS = {
    "llama": {"model_type": "llama", **SIZES, "rope_parameters": ROPE},
    "qwen2": {"model_type": "qwen2", **SIZES, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4},
}


def same_config(value: Any, undamaged: Any, file: Path) -> bool:
    """The structure of what stands there, which is kept whole."""
    content = plain(file)
    check_value(content, find_family(content["model_type"]).schema)
    return alike(value.config, content) and value.spec == ModelConfig(content).spec


def config(name: str) -> Subject:
    text = json.dumps(CONFIGS[name], indent=2).encode()
    return Subject(writes("config.json", text), lambda f: hf.read_config(f.parent), same_config)


def same_stop(value: Any, undamaged: Any, file: Path) -> bool:
    ids = plain(file).get("eos_token_id")
    return value == (set(ids) if isinstance(ids, list) else {ids} - {None})


# Weights: what the library of safetensors, which is another parser, finds in the same bytes.


def make_safetensors(folder: Path) -> Path:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b.c": torch.ones(2, dtype=torch.bfloat16)}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


def read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    return {name: stored.read() for name, stored in ours.index(file.parent).items()}


def same_tensors(value: dict, undamaged: dict, file: Path) -> bool:
    theirs = safetensors.torch.load(file.read_bytes())
    return value.keys() == theirs.keys() and all(
        value[n].dtype == t.dtype and value[n].shape == t.shape and bits(value[n]) == bits(t)
        for n, t in theirs.items()
    )


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# Files of torch.save: what torch itself takes from them, where it reads them.


def pickled(archive: bool) -> Subject:
    def make(folder: Path) -> Path:
        shared = torch.arange(12.0).view(3, 4)
        tensors = {"a": shared, "b.c": shared[1:, :2], "d": torch.ones(2, dtype=torch.bfloat16)}
        file = folder / "pytorch_model.bin"
        torch.save(tensors, file, _use_new_zipfile_serialization=archive)
        return file

    def same(value: dict, undamaged: dict, file: Path) -> bool:
        try:
            theirs = torch.load(file, weights_only=True)
        except Exception:  # it looks at more of an archive than numbers need, which may change
            shapes = {name: tensor.shape for name, tensor in undamaged.items()}
            return {name: tensor.shape for name, tensor in value.items()} == shapes
        theirs = {name: t for name, t in theirs.items() if isinstance(t, torch.Tensor)}
        return value.keys() == theirs.keys() and all(
            value[n].shape == t.shape and bits(value[n]) == bits(t) for n, t in theirs.items()
        )

    def read(file: Path) -> dict[str, torch.Tensor]:
        return {name: stored.read() for name, stored in torch_files.read_header(file).items()}

    return Subject(make, read, same)


def make_index(folder: Path) -> Path:
    for i, name in enumerate("ab"):
        shard = {f"t{i}": torch.full((2,), float(i)), f"u{i}": torch.ones(1)}
        safetensors.torch.save_file(shard, folder / f"{name}.safetensors")
    names = {"t0": "a", "u0": "a", "t1": "b", "u1": "b"}
    content = {"weight_map": {t: f"{n}.safetensors" for t, n in names.items()}, "metadata": {}}
    (folder / ours.INDEX).write_text(json.dumps(content))
    return folder / ours.INDEX


def same_shards(value: dict, undamaged: dict, file: Path) -> bool:
    """All tensors, those of a shard that the index still names whole."""
    check_value(plain(file), kinds.INDEX.schema)
    return value.items() <= undamaged.items() and value.keys() >= plain(file)["weight_map"].keys()


# YAML: PyYAML's own tree, in which every scalar is text.


def spec(file: Path) -> Any:
    return yaml.load(file.read_bytes().decode("utf-8-sig"), yaml.BaseLoader)


def stands_for(value: Any, text: Any) -> bool:
    """Whether `value` is what the tree of texts says."""
    if isinstance(value, dict):
        if not isinstance(text, dict) or len(value) != len(text):
            return False
        pairs = zip(value.items(), text.items(), strict=True)
        return all(stands_for(a, c) and stands_for(b, d) for (a, b), (c, d) in pairs)
    if isinstance(value, list):
        return (
            isinstance(text, list) and len(value) == len(text) and all(map(stands_for, value, text))
        )
    return value == text or alike(value, yaml.safe_load(str(text)))


def same_run(value: Any, undamaged: Any, file: Path) -> bool:
    values = gate.read_yaml(file, kinds.RUN)
    again = from_dict(RunConfig, values or {}, RunConfig(name="run"))
    return stands_for(values or {}, spec(file) or {}) and value == again


RUN = yaml.safe_dump(to_dict(RECIPES["quickstart"]()), sort_keys=False)
ACTIONS = simulation.make_schedule("1f1b", 2, 4)


def same_actions(value: Any, undamaged: Any, file: Path) -> bool:
    """The words of the file, line by line."""
    text = file.read_bytes().decode("utf-8-sig")
    if file.suffix == ".yaml":
        text = "\n".join(spec(file)["actions"])
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("placement:")]
    words = [[action(word) for word in line.split()] for line in lines]
    return words == [[tuple(a) for a in rank] for rank in value.actions]


def action(word: str) -> tuple:
    kind, micro, chunk = re.fullmatch(r"(.)(\d+)(?:\.(\d+))?", word).groups()
    return kind, int(micro), int(chunk or 0)


SCHEDULE_YAML = yaml.safe_dump(
    {"actions": schedule.format_schedule(ACTIONS).splitlines(), "placement": "loop"}
)

TIMES = {"forward": [1.0, 1.25], "input": 1.5, "weight": [0.5, 1], "backward": 3, "send": 0.05}

# Rows.

ROWS = [
    {"step": 1, "loss": 5.5, "lr": 1e-3, "tokens": 64, "grad_norm": None, "time": 1e9},
    {"step": 1, "val_loss": 4.5, "val_tokens": 640, "time": 1e9},
    {"step": 2, "loss": 5.25, "lr": 9e-4, "tokens": 128, "grad_norm": 1.5, "router/max_load": 1.0},
]
METRICS = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


HISTORY = "".join(
    json.dumps(row) + "\n"
    for row in (
        {"step": 0, "time": 1e9, "begun": "new", "steps": 9, "processes": 2, "changed": []},
        {"step": 1, "time": 1e9, "memory_gib": [0.5, 0.25], "router_load": {"1": [1.5, 0.5]}},
        {"step": 9, "time": 1e9, "ended": "done"},
    )
).encode()


def read_history(file: Path) -> list[dict]:
    return list(Tail(file, kinds.HISTORY_ROW).read())


def same_some_rows(value: Any, undamaged: Any, file: Path) -> bool:
    """Of a file whose rows stand for themselves: those of its whole lines that can be read."""
    left = iter(line for line in file.read_bytes().split(b"\n")[:-1] if line.strip())
    return all(any(_alike(row, line) for line in left) for row in value)


def _alike(row: Any, line: bytes) -> bool:
    try:
        return alike(row, json.loads(line.decode("utf-8-sig")))
    except (ValueError, RecursionError):  # of a line that the gate refuses
        return False


def same_rows(value: Any, undamaged: Any, file: Path) -> bool:
    """Of a record that a crash may cut: the rows before the first that is damaged."""
    lines = [line for line in file.read_bytes().split(b"\n") if line.strip()][: len(value)]
    return len(lines) == len(value) and all(
        alike(row, json.loads(line.decode("utf-8-sig")))
        for row, line in zip(value, lines, strict=True)
    )


TEXTS = "".join(
    json.dumps({"text": f"row {i} \u00e4", "meta": {"id": i}}, ensure_ascii=bool(i % 2)) + "\n"
    for i in range(4)
).encode()


def read_texts(file: Path) -> list[str]:
    return ["".join(blocks) for blocks in readers.read_documents(file, "text")]


def same_texts(value: Any, undamaged: Any, file: Path) -> bool:
    lines = [line for line in file.read_bytes().split(b"\n") if line.strip()]
    return value == [json.loads(line.decode("utf-8-sig"))["text"] or "" for line in lines]


# The token cache: each file under a digest, and the index that holds them under its own.


def cached(name: str) -> Subject:
    def make(folder: Path) -> Path:
        for i, part in enumerate(corpus.FORM.files):
            (folder / part).write_bytes(bytes(range(40 + i)))
        index = {
            **{"format": 2, "files": [["a.txt", 4, 1, 2]], "hubs": [["h", 1, [["b", 3, 1, 2]]]]},
            **{"text_field": "text", "tokenizer": "t", "end_of_text": 1, "dtype": "<u2"},
            **{"tokens": 20, "documents": 1, "bytes": 40, "different": 1, "content": "c"},
            **{"vocabulary": 300, "largest": 255},
            "sizes": {part: (folder / part).stat().st_size for part in corpus.FORM.files},
            "digests": {part: token_cache.file_digest(folder / part) for part in corpus.FORM.files},
        }
        index["digest"] = token_cache.digest_of(index)
        (folder / "index.json").write_text(json.dumps(index))
        return folder / name

    return Subject(
        make, lambda file: token_cache.check_folder(file.parent, corpus.FORM, {}, True), equal
    )


# A checkpoint: under a seal.


def checkpoint(name: str, read: Callable[[Path], Any]) -> Subject:
    def make(folder: Path) -> Path:
        saved = Checkpoints(folder, SINGLE, keep=0)
        tensors = {"model/a": torch.arange(6.0).view(2, 3), "model/b": torch.ones(3)}
        saved.save(1, tensors, {"run": {"model": {}}, "step": 1, "data": {"x": "y"}}, wait=True)
        return saved.path(1) / name

    return Subject(make, read, equal)


def read_state(file: Path) -> dict:
    return seal.read_sealed(file.parent)[1]


def read_metadata(file: Path) -> str:
    return repr(metadata.read_metadata(seal.read_sealed(file.parent)[0]))


# Megatron's data sets: damaged, their columns are what struct finds.


def make_indexed(folder: Path) -> Path:
    tokens, lengths = np.arange(8), np.array([3, 2, 3])
    blocks, dtype = [tokens], np.dtype("<u2")
    indexed.save(folder / "corpus.bin", blocks, dtype, lengths, np.array([0, 1, 3]), lengths)
    return folder / "corpus.idx"


def read_indexed(file: Path) -> list[list[int]]:
    found = indexed.read(file.with_suffix(".bin"))
    modes = [] if found.modes is None else found.modes.tolist()
    return [found.tokens.tolist(), found.lengths.tolist(), found.documents.tolist(), modes]


def same_indexed(value: list[list[int]], undamaged: Any, file: Path) -> bool:
    data = file.read_bytes()
    code, sequences, documents = struct.unpack_from("<BQQ", data, 17)
    form = "BbhiqdfH"[code - 1]
    tokens = file.with_suffix(".bin").read_bytes()
    lengths = struct.unpack_from(f"<{sequences}i", data, 34)
    firsts = struct.unpack_from(f"<{documents}q", data, 34 + 12 * sequences)
    rest = data[34 + 12 * sequences + 8 * documents :]
    modes = list(struct.unpack(f"{len(rest)}b", rest))
    plain = struct.unpack(f"<{len(tokens) // struct.calcsize(form)}{form}", tokens)
    return value[:3] == [list(plain), list(lengths), list(firsts)] and value[3] == modes


# Megatron's torch_dist: its description, damaged, is what pickle finds, or none.


def make_dist(folder: Path) -> Path:
    tensor = dcp.TensorStorageMetadata(
        dcp.TensorProperties(dtype=torch.float32),
        torch.Size([4, 3]),
        [dcp.ChunkStorageMetadata(torch.Size([2 * i, 0]), torch.Size([2, 3])) for i in range(2)],
    )
    described = {"decoder.layers.a.weight": tensor, "rng/shard_0_1": dcp.BytesStorageMetadata()}
    places = {
        dcp.MetadataIndex("decoder.layers.a.weight", torch.Size([2 * i, 0]), i): Place(
            f"__{i}_0.distcp", 100 * i, 90
        )
        for i in range(2)
    }
    places[dcp.MetadataIndex("rng/shard_0_1")] = Place("__0_0.distcp", 300, 20)
    paths = {key: (key,) for key in described}
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.Metadata(described, paths, places)))
    return folder / ".metadata"


def same_dist(value: metadata.Foreign, undamaged: Any, file: Path) -> bool:
    plain = pickle.loads(file.read_bytes())
    tensors = {n: t for n, t in plain.state_dict_metadata.items() if n in value.tensors}
    places = {i: p for i, p in plain.storage_data.items() if i.fqn in tensors}
    others = {i.fqn: p for i, p in plain.storage_data.items() if i.fqn not in tensors}
    return repr(value) == repr(metadata.Foreign(tensors, places, others))


# Tokenizers: what the gate lets through is read by `tokenizers`, which may refuse it in words.


def make_tokenizer(folder: Path) -> Path:
    vocabulary = {chr(97 + i): i for i in range(20)} | {"ab": 20}
    made = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\s+"), "isolated")
    made.add_special_tokens(["<|end|>"])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def read_tokenizer(file: Path) -> Any:
    content = gate.read_json(file, kinds.TOKENIZER)
    list(tokenizer_files.expressions(content))
    try:
        with tokenizer_files.refused_by_name(file):
            Tokenizer.from_file(str(file))
    except Exception as error:  # in words, as load_tokenizer tells them
        raise gate.refuse(file, error) from None
    return content


ADAPTER_CONFIG = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "use_rslora": False,
    "bias": "none",
    "base_model_name_or_path": "model",
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|end|>",
    "bos_token": {"content": "<|end|>", "lstrip": False},
    "added_tokens_decoder": {"21": {"content": "<|end|>", "special": True}},
    "model_max_length": 1000000000000000019884624838656,
}
SUMMARY = {
    "steps": 4,
    "seconds": 1.5,
    "signal": 0,
    "val_loss": 2.5,
    "val_step": 4,
    "val_tokens": 64,
    "held_out_tokens": 640,
    "bits_per_byte": None,
    "validation_files": ["a.txt"],
    "val_sources": {"a": 2.5},
    "val_sources_per_byte": {"a": 1.5},
    "val_sources_before": {"a": 3.5},
    "goodput": {"steps": 1.0},
    "slow_ranks": {},
    "writer": "",
}

GOODPUT = {
    "until": 1.7e9,
    "reached": 7,
    "seconds": {"steps": 3.5, "start": 1.5},
    "slow": {"rank 1 delays reduce_scalar in optimizer_step (training/step.py)": 0.5},
}

SUBJECTS = {
    **{f"config.json of {name}": config(name) for name in CONFIGS},
    "generation_config.json": Subject(
        writes("generation_config.json", b'{"eos_token_id": [1, 2], "bos_token_id": 0}'),
        lambda file: engine.stop_tokens(hf.Transformers(file.parent, ModelConfig(CONFIGS["gpt2"]))),
        same_stop,
    ),
    "pytorch_model.bin": pickled(archive=True),
    "pytorch_model.bin from before archives": pickled(archive=False),
    "model.safetensors": Subject(make_safetensors, read_safetensors, same_tensors),
    "model.safetensors.index.json": Subject(
        make_index, lambda f: ours.index(f.parent), same_shards
    ),
    "tokenizer.json": Subject(make_tokenizer, read_tokenizer, said(kinds.TOKENIZER.schema)),
    "tokenizer_config.json": json_subject(
        "tokenizer_config.json", kinds.TOKENIZER_CONFIG, TOKENIZER_CONFIG
    ),
    "special_tokens_map.json": json_subject(
        "special_tokens_map.json", kinds.SPECIAL_TOKENS_MAP, {"eos_token": "<|end|>"}
    ),
    "adapter_config.json": json_subject(
        "adapter_config.json", kinds.ADAPTER_CONFIG, ADAPTER_CONFIG
    ),
    "config.yaml": Subject(writes("run.yaml", RUN.encode()), read_run, same_run),
    "config.yaml of a run": Subject(
        writes("run.yaml", gate.seal_yaml(RUN).encode()), read_run, same_run
    ),
    "schedule.txt": Subject(
        writes("s.txt", schedule.format_schedule(ACTIONS).encode()),
        lambda f: schedule.from_file(str(f)),
        same_actions,
    ),
    "schedule.yaml": Subject(
        writes("s.yaml", SCHEDULE_YAML.encode()), lambda f: schedule.from_file(str(f)), same_actions
    ),
    "times of a schedule.json": json_subject("times.json", kinds.COSTS, TIMES),
    "metrics.jsonl": Subject(writes("metrics.jsonl", METRICS), metrics.read_metrics, same_rows),
    "history.jsonl": Subject(writes("history.jsonl", HISTORY), read_history, same_some_rows),
    "rows.jsonl": Subject(writes("rows.jsonl", TEXTS), read_texts, same_texts),
    "summary.json": json_subject("summary.json", kinds.SUMMARY, SUMMARY),
    "goodput.json": json_subject("goodput.json", kinds.GOODPUT, GOODPUT),
    "attention.json of the cache": json_subject(
        "attention.json", kinds.ATTENTION_TIMES, {"NVIDIA H200: 1 x 4096": {"flash": 1.5}}
    ),
    "index.json of the cache": cached("index.json"),
    "tokens.bin of the cache": cached("tokens.bin"),
    "corpus.idx": Subject(make_indexed, read_indexed, same_indexed),
    "state.json": checkpoint("state.json", read_state),
    "seal": checkpoint("seal", read_state),
    ".metadata": checkpoint(".metadata", read_metadata),
    ".metadata of torch_dist": Subject(make_dist, metadata.read_foreign, same_dist),
}
