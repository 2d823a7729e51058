"""Meta's own files of Llama (consolidated.00.pth, ..., params.json) as a source (source.py): one
file per rank of tensor parallelism, which are joined tensor by tensor.

    params.json           dim, n_layers, n_heads, n_kv_heads, norm_eps, rope_theta, vocab_size, ...
    consolidated.00.pth   layers.0.attention.wq.weight: rows in pairs that rope turns
    consolidated.01.pth   the other half of its rows; of wo and w2 of its columns
"""

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval
from torch import Tensor

from dolmen.conversion import sidecars
from dolmen.conversion.megatron.shares import Share, share
from dolmen.conversion.sidecars import Joined
from dolmen.conversion.weights import WeightsAlone
from dolmen.core.config import AboveZero, NonNegative
from dolmen.core.messages import plural
from dolmen.families import ModelConfig, edit
from dolmen.families.rules import Paired, Rename, Rule, StoredTensor, entries
from dolmen.files import gate, torch_files
from dolmen.files.gate import Kind
from dolmen.files.kinds import HEADS, LAYERS, POSITIONS, WIDTH
from dolmen.files.safetensors import Spec, Stored
from dolmen.files.schema import typed_dict
from dolmen.model.spec import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    Llama3Scaling,
    LMHeadSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    group_repeats,
)

PARAMS = "params.json"
FILE = re.compile(r"consolidated\.([0-9][0-9])\.pth")
KIND = Kind(
    typed_dict(
        {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "norm_eps": NonNegative},
        {
            "n_kv_heads": HEADS | None,
            "vocab_size": Annotated[int, Interval(ge=-1, le=2**26)],
            "rope_theta": AboveZero,
            "use_scaled_rope": bool,
            "rope_scaling_factor": AboveZero | None,
            "max_seq_len": POSITIONS,
        },
    ),
    size=2**20,
)
ONLY = ("moe", "sliding_window", "quantization_args", "lora_args", "vision_chunk_size")
"""Fields of params.json that change what is computed, and are not supported: they must be empty."""
EMBEDDING, HEAD, UP = "tok_embeddings.weight", "output.weight", "layers.0.feed_forward.w3.weight"


def is_meta(folder: Path) -> bool:
    """Return whether a folder has consolidated.NN.pth files. One with a config.json too is opened
    as a transformers directory.
    """
    return any(FILE.fullmatch(path.name) for path in folder.glob("consolidated.*.pth"))


def rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules between Meta's tensor names and ours; q and k are stored with rope
    pairs as neighbours.
    """
    layer, ours = "layers.{}.", "layers.{}."
    mixer = spec.blocks[0].mixer
    assert isinstance(mixer, AttentionSpec)
    names = {
        "attention_norm": "attn_norm",
        "attention.wv": "attn.v",
        "attention.wo": "attn.o",
        "ffn_norm": "mlp_norm",
        "feed_forward.w1": "mlp.gate",
        "feed_forward.w3": "mlp.up",
        "feed_forward.w2": "mlp.down",
    }
    return [
        Rename("tok_embeddings", "embed"),
        Paired(f"{layer}attention.wq", f"{ours}attn.q", mixer.heads),
        Paired(f"{layer}attention.wk", f"{ours}attn.k", mixer.kv_heads),
        *(Rename(layer + stored, ours + name) for stored, name in names.items()),
        Rename("norm", "final_norm"),
        Rename("output", "head"),
    ]


@dataclass(frozen=True)
class Consolidated(WeightsAlone, Joined):
    """Meta's files of all ranks as a source; their weights are read as those of `model`."""

    ranks: tuple[Mapping[str, Stored], ...]

    @property
    def where(self) -> Path:
        """Folder of the consolidated.NN.pth files."""
        return self.sidecar_folder

    @property
    def title(self) -> str:
        """Text with the folder and number of ranks."""
        return f"{self.where}, Meta's files of {plural(len(self.ranks), 'rank')}"

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Shape and stored dtype of each parameter. Raises KeyError or ValueError where stored
        tensors do not fit the model.
        """
        _ = self._checked
        return {
            name: Spec(param.shape, self.ranks[0][self._holding[name].hf].spec.dtype)
            for name, param in self.spec.params.items()
        }

    @cached_property
    def _entries(self) -> dict[str, StoredTensor]:
        """Name in Meta's files -> which of our parameters the tensor holds."""
        return entries(rules(self.spec), self.spec.shapes, self.spec.layers)

    def _share(self, name: str) -> Share:
        """Return how ranks shard the tensor with this stored name: as ours do, except that Llama 1
        and 2 shard the embedding by columns.
        """
        # ParallelEmbedding of Llama 1 and 2 cuts columns, VocabParallelEmbedding of Llama 3 rows
        if name == EMBEDDING:
            return Share(_embedding_dim(self.ranks, self.spec.hidden_size))
        entry = self._entries[name]
        return Share(share(entry, self.spec.params[entry.ours[0]]).dim)

    @cached_property
    def _checked(self) -> list[str]:
        """Stored names, after checking names, shapes and dtypes on every rank. Raises KeyError or
        ValueError where they do not fit the model, or ranks differ.
        """
        for i, rank in enumerate(self.ranks):
            # a buffer in Llama 1's files
            names = {name for name in rank if name != "rope.freqs"}
            if other := sorted(names ^ self._entries.keys()):
                raise KeyError(
                    f"{self.where}, rank {i}: {plural(len(other), 'tensor is', 'tensors are')} in "
                    f"only one of the file and the model of {PARAMS}, e.g. {other[:3]}"
                )
        for name, entry in self._entries.items():
            self._share(name).check([rank[name] for rank in self.ranks], entry.shape)
        return list(self._entries)

    def _tensor(self, name: str) -> Tensor:
        """Read the tensor with this stored name, joined from all ranks."""
        of = self._share(name)
        ranks = self.ranks[:1] if of.dim is None else self.ranks
        return of.join(rank[name].read() for rank in ranks)


def open_meta(folder: Path) -> Consolidated:
    """Open Meta's files of a Llama in a folder as a source; the model is that of params.json.
    Raises ValueError for a missing rank, and for what dolmen does not compute.
    """
    names = sorted(path.name for path in folder.iterdir() if FILE.fullmatch(path.name))
    expected = [f"consolidated.{i:02d}.pth" for i in range(len(names))]
    if missing := [name for name in expected if name not in names]:
        raise ValueError(f"{folder} has no {missing[0]}, but {names[-1]}: a rank is missing")
    ranks = tuple(torch_files.read_header(folder / name) for name in names)
    return Consolidated(_model(folder, ranks), folder, ranks)


def _embedding_dim(ranks: tuple[Mapping[str, Stored], ...], hidden: int) -> int:
    """Return the dim along which ranks shard the embedding: 0 (rows) if each has the full width,
    else 1.
    """
    return 0 if ranks[0][EMBEDDING].spec.shape[-1] == hidden else 1


def _model(folder: Path, ranks: tuple[Mapping[str, Stored], ...]) -> ModelConfig:
    """Return the model of params.json; the MLP width, the vocabulary where it is not stated, the
    tied head and the dtype follow from the tensors. Raises ValueError or KeyError for files that
    are not a Llama of Meta's.
    """
    if not (folder / PARAMS).is_file():
        raise ValueError(f"{folder} has no {PARAMS}, from which the model's sizes are read")
    params = gate.read_json(folder / PARAMS, KIND)
    for name in ONLY:
        if params.get(name):
            raise gate.refuse(
                folder / PARAMS, f"{name} is {json.dumps(params[name])}, which is not supported"
            )
    # the two tensors that sizes are read from
    lost = [name for name in (EMBEDDING, UP) if name not in ranks[0]]
    if lost or any(len(ranks[0][name].spec.shape) != 2 for name in (EMBEDDING, UP)):
        raise KeyError(f"{folder} has no {lost or 'matrix'}: it is not a Llama of Meta's")
    size, heads = params["dim"], params["n_heads"]
    if size % heads:
        raise gate.refuse(folder / PARAMS, f"dim ({size}) is not divisible by n_heads ({heads})")
    full = Share(_embedding_dim(ranks, size)).full_shape(ranks[0][EMBEDDING].spec.shape, len(ranks))
    norm = NormSpec("rmsnorm", float(params["norm_eps"]))
    mixer = AttentionSpec(
        heads, params.get("n_kv_heads") or heads, size // heads, positions=_rope(folder, params)
    )
    # the width follows from multiple_of and ffn_dim_multiplier: the tensor is simpler
    inner = ranks[0][UP].spec.shape[0] * len(ranks)
    # -1 in Llama 1 and 2: it was the tokenizer's
    rows = params.get("vocab_size", -1)
    spec = ModelSpec(
        hidden_size=size,
        embedding=EmbeddingSpec(full[0] if rows < 0 else rows),
        runs=group_repeats([BlockSpec(mixer, MLPSpec(inner), norm)] * params["n_layers"]),
        final_norm=norm,
        head=LMHeadSpec(tied=HEAD not in ranks[0]),
        max_position_embeddings=_longest(params),
    )
    # the family follows from the spec: llama
    model = sidecars.with_special_tokens(sidecars.express(spec), sidecars.tokenizer(folder))
    dtype = ranks[0][EMBEDDING].spec.dtype
    return edit(model, dtype=str(dtype).removeprefix("torch."))


def _rope(folder: Path, params: Mapping[str, Any]) -> RopeSpec:
    """Return rope from params.json, with Llama 3's scaling where `use_scaled_rope` is set. Warns
    where its factor is not stated, and takes 8.
    """
    scaling, factor = None, params.get("rope_scaling_factor")
    if params.get("use_scaled_rope"):
        # params.json of Llama 3.1 and 3.2 has the flag and no factor
        if factor is None:
            warnings.warn(
                f"{folder / PARAMS} has use_scaled_rope without a factor: 8 is used, as in Llama "
                "3.1 (for Llama 3.2 add rope_scaling_factor 32)",
                stacklevel=4,
            )
        scaling = Llama3Scaling(float(factor or 8), 1.0, 4.0, 8192)
    return RopeSpec(
        params["dim"] // params["n_heads"], float(params.get("rope_theta", 10000.0)), scaling
    )


def _longest(params: Mapping[str, Any]) -> int:
    """Return the longest sequence in tokens: as stated, else that of the Llama release with this
    rope base (its params.json has no such field).
    """
    theta = params.get("rope_theta", 10000.0)
    # Llama 1 (eps 1e-6): 2048; Llama 2 (1e-5): 4096; Code Llama (theta 1e6): 16384; Llama 3: 8192
    by_theta = {10000.0: 4096 if params["norm_eps"] > 1e-6 else 2048, 1e6: 16384}
    known = 131072 if params.get("use_scaled_rope") else by_theta.get(theta, 8192)
    return params.get("max_seq_len", known)
