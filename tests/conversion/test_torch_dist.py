"""Checkpoints of torch_dist, made here chunk by chunk as their text says, compute what transformers
computes; what does not fit together is refused in a line.
"""

import argparse
import json
import pickle
import sys
import types
import warnings

import pytest
import torch
import transformers
from laid import LOCAL, How, Parts, of_gpt2, of_llama, padded, qkv
from test_megatron_read import GPT2, LLAMA, TOKENS, VOCABULARY, built
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dolmen.checkpoint.metadata import read_foreign
from dolmen.conversion import convert
from dolmen.conversion.config import ConvertConfig
from dolmen.conversion.megatron import dist
from dolmen.conversion.source import open_source
from dolmen.files.safetensors import Spec
from dolmen.model import head
from dolmen.serving import engine

NORMS = {"norm1": "self_attention.linear_qkv.layer_norm_", "norm2": "mlp.linear_fc1.layer_norm_"}


class Files:
    """Two .distcp files, filled by turns, and their description."""

    def __init__(self, folder, first=0):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.tensors, self.places, self.turn = folder, {}, {}, 0
        self.streams = [open(folder / f"__{first + i}_0.distcp", "wb") for i in range(2)]

    def put(self, value):
        stream, self.turn = self.streams[self.turn], 1 - self.turn
        start = stream.tell()
        torch.save(value, stream)
        return _StorageInfo(stream.name.split("/")[-1], start, stream.tell() - start)

    def add(self, key, whole_shape, dtype, chunks):
        """`chunks`: offsets -> tensor."""
        described = []
        for i, (offsets, tensor) in enumerate(chunks.items()):
            place = self.put(tensor.clone())
            self.places[MetadataIndex(key, torch.Size(offsets), i)] = place
            described.append(ChunkStorageMetadata(torch.Size(offsets), tensor.shape))
        self.tensors[key] = TensorStorageMetadata(
            TensorProperties(dtype=dtype), torch.Size(whole_shape), described
        )

    def extend(self, key, whole_shape, chunks):
        """`add`, to what was added before."""
        before = self.tensors.pop(key, None)
        old = [] if before is None else before.chunks
        described = list(old)
        for offsets, tensor in chunks.items():
            self.places[MetadataIndex(key, torch.Size(offsets))] = self.put(tensor.clone())
            described.append(ChunkStorageMetadata(torch.Size(offsets), tensor.shape))
        self.tensors[key] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), torch.Size(whole_shape), described
        )

    def close_behind(self):
        """Adds all to the description that is there."""
        metadata = pickle.loads((self.folder / ".metadata").read_bytes())
        metadata.state_dict_metadata |= self.tensors
        metadata.storage_data |= self.places
        (self.folder / ".metadata").write_bytes(pickle.dumps(metadata))
        for stream in self.streams:
            stream.close()

    def bytes(self, key, value):
        self.tensors[key] = BytesStorageMetadata()
        self.places[MetadataIndex(key)] = self.put(value)

    def close(self, common, entry=False):
        if entry:
            self.bytes("common_state/shard_0_1", [common])
        else:
            torch.save(common, self.folder / "common.pt")
        for stream in self.streams:
            stream.close()
        with open(self.folder / ".metadata", "wb") as file:
            pickle.dump(Metadata(self.tensors, None, self.places), file)
        marker = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (self.folder / "metadata.json").write_text(json.dumps(marker))


def cut(tensor, dim, tp, halves=1):
    """Offsets -> chunk, as tp ranks write a tensor: of [gate; up] each rank one of either."""
    size, found = tensor.shape[dim] // (tp * halves), {}
    for rank in range(tp):
        for half in range(halves):
            start = half * tp * size + rank * size
            offsets = [0] * tensor.ndim
            offsets[dim] = start
            found[tuple(offsets)] = tensor.narrow(dim, start, size)
    return found


def whole_layer(parts: Parts, i: int, fault=None) -> dict:
    """Key within a layer -> (tensor, dim that tp cuts, halves)."""
    layer, made = parts.layers[i], {}
    one = How(LOCAL, faults=(fault,) if fault else ())
    for kind in ("weight", "bias"):
        for ours, name in NORMS.items():
            if f"{ours}.{kind}" in layer:
                made[f"{name}{kind}"] = (layer[f"{ours}.{kind}"], None, 1)
        if f"q.{kind}" not in layer:
            continue
        made[f"self_attention.linear_qkv.{kind}"] = (qkv(parts, layer, kind, one, 0), 0, 1)
        up = layer[f"up.{kind}"]
        if parts.gated:
            pair = [layer[f"gate.{kind}"], up]
            up = torch.cat(pair[::-1] if fault == "gate and up are swapped" else pair)
        made[f"mlp.linear_fc1.{kind}"] = (up, 0, 2 if parts.gated else 1)
        for ours, name in (("o", "self_attention.linear_proj"), ("down", "mlp.linear_fc2")):
            made[f"{name}.{kind}"] = (layer[f"{ours}.{kind}"], 1 if kind == "weight" else None, 1)
    return made


def lay(folder, parts: Parts, tp=2, stacked=True, entry=False, fault=None, without="-", state=None):
    """The folder of the tracker; no layer has tensors whose names begin as `without`. `state`:
    what `common` says of the optimizer, and by what stands before their keys its tensors, as parts
    of a model whose weights they are.
    """
    iteration = 12
    files = Files(folder / f"iter_{iteration:07d}")
    how = dict(tp=tp, stacked=stacked, fault=fault, without=without)
    lay_tensors(files, "", parts, **how)
    said, kinds = state or ({}, {})
    for prefix, one in kinds.items():
        lay_tensors(files, prefix, one, **how)
    files.bytes("decoder.layers.mlp.linear_fc1._extra_state/shard_0_4", None)
    files.bytes("rng_state/shard_0.0_1.1", [{"random_rng_state": (3, (1, 2), None)}])
    args = argparse.Namespace(**parts.args, tensor_model_parallel_size=tp)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": iteration, **said}
    files.close(common, entry)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def lay_tensors(files, prefix, parts: Parts, tp, stacked, fault, without):
    how = How(LOCAL, tp=tp)
    ends = {"embed": "embedding.word_embeddings.weight", "head": "output_layer.weight"}

    def add(key, shape, chunks):
        (dtype,) = {chunk.dtype for chunk in chunks.values()}
        files.add(prefix + key, shape, dtype, chunks)

    for ours, key in ends.items():
        if ours in parts.ends:
            table = padded(parts.ends[ours], how)
            add(key, table.shape, cut(table, 0, tp))
    if "positions" in parts.ends:
        table = parts.ends["positions"]
        add("embedding.position_embeddings.weight", table.shape, {(0, 0): table})
    for kind in ("weight", "bias"):
        if f"norm.{kind}" in parts.ends:
            norm = parts.ends[f"norm.{kind}"]
            add(f"decoder.final_layernorm.{kind}", norm.shape, {(0,): norm})
    layers = [whole_layer(parts, i, fault) for i in range(len(parts.layers))]
    for name in [name for name in layers[0] if not name.startswith(without)]:
        stack = {}
        for i, layer in enumerate(layers):
            tensor, dim, halves = layer[name]
            chunks = {(0,) * tensor.ndim: tensor} if dim is None else cut(tensor, dim, tp, halves)
            if not stacked:
                add(f"decoder.layers.{i}.{name}", tensor.shape, chunks)
            stack |= {(i, *at): chunk[None] for at, chunk in chunks.items()}
        if stacked:
            add(f"decoder.layers.{name}", (len(layers), *tensor.shape), stack)


@pytest.fixture(scope="module")
def models():
    made = {
        "llama": built(transformers.LlamaConfig(**LLAMA)),
        "llama, tied": built(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
        "gpt2": built(transformers.GPT2Config(**GPT2)),
    }
    with torch.no_grad():
        return {name: (model, model(TOKENS).logits) for name, model in made.items()}


def parts(model):
    return of_gpt2(model) if model.config.model_type == "gpt2" else of_llama(model)


def difference(folder, logits) -> float:
    decoder = engine.load_decoder(open_source(folder, vocab_size=VOCABULARY))
    with torch.no_grad():
        return float((decoder(TOKENS, head.compute_logits) - logits).abs().max())


CASES = {
    "stacked, tp 2": ("llama", {}),
    "a layer each, the common state an entry": ("llama, tied", dict(stacked=False, entry=True)),
    "learned positions and biases": ("gpt2", dict(entry=True)),
    "one rank": ("gpt2", dict(tp=1, stacked=False)),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, models, tmp_path):
    name, how = CASES[case]
    model, logits = models[name]
    folder = lay(tmp_path, parts(model), **how)
    assert difference(folder, logits) < 2e-5
    source = open_source(folder / "iter_0000012", vocab_size=VOCABULARY)
    assert source.iteration == 12 and source.title.endswith("a torch_dist checkpoint of Megatron")


@pytest.mark.parametrize("alone", [False, True])
def test_experts(alone, tmp_path):
    """Stacked behind layers, or each a tensor of its own."""
    config = transformers.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2)
    model = built(config)
    with torch.no_grad():
        logits = model(TOKENS).logits
    state, prefix = model.state_dict(), "model.layers.{}.mlp."
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    plain.load_state_dict(state, strict=False)
    made = of_llama(plain)
    made.args |= dict(num_experts=4, moe_router_topk=2, moe_router_pre_softmax=False)
    made.args |= dict(moe_ffn_hidden_size=40, rotary_base=1_000_000)
    folder = lay(tmp_path, made, without="mlp.linear_fc")
    files = Files(folder / "iter_0000012", first=2)
    norm = [layer["norm2.weight"] for layer in made.layers]
    router = [state[prefix.format(i) + "gate.weight"] for i in range(4)]
    for key, rows in (("pre_mlp_layernorm.weight", norm), ("mlp.router.weight", router)):
        stack = torch.stack(rows)
        chunks = {(i, *[0] * (stack.ndim - 1)): stack[i : i + 1] for i in range(4)}
        files.add(f"decoder.layers.{key}", stack.shape, stack.dtype, chunks)
    for key, name in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        stack = torch.stack([state[f"{prefix.format(i)}experts.{name}"] for i in range(4)])
        halves = [slice(0, 40), slice(40, 80)] if key == "linear_fc1" else [slice(None)]
        for e in range(4):
            chunks = {
                (i, *([] if alone else [e]), half.start or 0, 0): stack[i : i + 1, e, half]
                if alone
                else stack[i : i + 1, e : e + 1, half]
                for i in range(4)
                for half in halves
            }
            shape = (4, *stack.shape[2:]) if alone else stack.shape
            own = f"{e}.{key}" if alone else key
            files.extend(f"decoder.layers.mlp.experts.experts.{own}.weight", shape, chunks)
    files.close_behind()
    assert difference(folder, logits) < 2e-5


@pytest.mark.parametrize("fault", ["gate and up are swapped", "k and v are swapped"])
def test_the_logits_see_a_swap(fault, models, tmp_path):
    model, logits = models["llama"]
    assert difference(lay(tmp_path, parts(model), fault=fault), logits) > 0.1


@pytest.fixture
def folder(models, tmp_path):
    return lay(tmp_path / "m", parts(models["llama"][0])) / "iter_0000012"


def described(change):
    def damage(folder):
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return damage


def place(key, **changes):
    def change(metadata):
        index = next(index for index in metadata.storage_data if index.fqn == key)
        for name, value in changes.items():
            setattr(metadata.storage_data[index], name, value)

    return described(change)


def lost(key):
    def change(metadata):
        del metadata.state_dict_metadata[key]
        metadata.storage_data = {i: p for i, p in metadata.storage_data.items() if i.fqn != key}

    return described(change)


def moved(key):
    """The last chunk of a tensor to a row before its own: one row has two, and the last none."""

    def change(metadata):
        chunk = metadata.state_dict_metadata[key].chunks[-1]
        index = next(i for i in metadata.storage_data if i.fqn == key and i.offset == chunk.offsets)
        stored = metadata.storage_data.pop(index)
        chunk.offsets = torch.Size([chunk.offsets[0] - 1, *chunk.offsets[1:]])
        metadata.storage_data[MetadataIndex(key, chunk.offsets, index.index)] = stored

    return described(change)


class Evil:
    def __reduce__(self):
        return print, ("evil",)


NORM, HEAD = "decoder.final_layernorm.weight", "output_layer.weight"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda f: (f / "common.pt").unlink(),
            "common.pt: is not there, and .metadata has no comm",
        ),
        (lambda f: (f / ".metadata").unlink(), r"\.metadata: cannot be read"),
        (
            lambda f: (f / "__0_0.distcp").write_bytes(b""),
            r"__0_0.distcp: is truncated: 0 bytes, but \.m",
        ),
        (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp: cannot be read"),
        (
            lambda f: (f / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
            "metadata.json: has the backend zarr: only torch_dist is supported",
        ),
        (
            described(lambda m: m.state_dict_metadata.update(evil=Evil())),
            "it names builtins.print, which is not allowed",
        ),
        (place(NORM, relative_path="../x.distcp"), "it names ../x.distcp, a file outside"),
        (place(NORM, offset=-1), "the place of decoder.final_layernorm.weight is not a position"),
        (place(NORM, length=4), "has no room for 128 bytes"),
        (place(NORM, offset=0), "cannot be read|holds no torch.float32 of"),
        (moved(HEAD), "chunks of output_layer.weight overlap"),
        (lost(HEAD), r"1 tensor is missing, e.g. \['output_layer.weight'\]"),
        (
            described(lambda m: m.state_dict_metadata.update(odd=m.state_dict_metadata[NORM])),
            "it describes only parts of 1 tensors, e.g. .'odd'",
        ),
        (
            described(lambda m: setattr(m.state_dict_metadata[NORM], "size", torch.Size([64]))),
            "the chunks of decoder.final_layernorm.weight do not add up to it",
        ),
        (lambda f: torch.save({"args": {}}, f / "common.pt"), "common.pt: has no `args`"),
        (lambda f: torch.save({"args": Evil()}, f / "common.pt"), "it names __builtin__.print"),
    ],
)
def test_what_does_not_fit_is_refused(folder, damage, said):
    damage(folder)
    with pytest.raises((ValueError, KeyError), match=said) as error:
        dict(open_source(folder, vocab_size=VOCABULARY).stream())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: f.write_bytes(bytes(99))])
def test_a_file_that_is_not_whole_is_refused_before_a_tensor_is_read(folder, damage):
    damage(folder / "__0_0.distcp")
    with pytest.raises(ValueError, match="__0_0.distcp: (cannot be read|is truncated: 99 bytes)"):
        open_source(folder, vocab_size=VOCABULARY)


def test_a_layer_too_few(models, tmp_path):
    made = parts(models["llama"][0])
    made.args["num_layers"] = 5
    with pytest.raises(ValueError, match="has 4 layers, num_layers in its args is 5"):
        open_source(lay(tmp_path, made), vocab_size=VOCABULARY)


def test_chunks_that_lie_over_each_other(tmp_path):
    """As large as the tensor in all, but the last row is in none."""
    files, row = Files(tmp_path / "f"), torch.ones(1, 2)
    files.add("x", (3, 2), row.dtype, {(0, 0): row.expand(2, 2), (1, 0): row})
    files.close({})
    description = read_foreign(tmp_path / "f" / ".metadata")
    (chunks,) = dist.chunks_of(tmp_path / "f", description).values()
    by_row = dist.group_by_index(chunks, 1)
    spec = Spec((2,), torch.float32)
    for at, whole in ((0, True), (1, False), (2, False)):
        one = dist.Pieces("x", spec, tmp_path, 0, (at,), tuple(by_row.get((at,), ())))
        if whole:
            assert one.read().tolist() == [1.0, 1.0]
        else:
            with pytest.raises(ValueError, match=r"has [04] of 2 numbers of x"):
                one.read()


def test_a_tensor_that_is_transposed_in_its_file(models, tmp_path):
    """Its numbers lie by columns; the archive says so."""
    files, table = Files(tmp_path / "f"), torch.arange(6.0).view(3, 2)
    files.add("x", (3, 2), table.dtype, {(0, 0): table})
    files.places = {i: files.put(table.t().contiguous().t()) for i in files.places}
    files.close({})
    description = read_foreign(tmp_path / "f" / ".metadata")
    chunks = tuple(dist.chunks_of(tmp_path / "f", description)["x"])
    row = dist.Pieces("x", Spec((2,), torch.float32), tmp_path, 0, (1,), chunks)
    assert row.read().tolist() == [2.0, 3.0]


def whole(folder) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as torch's own reader finds them."""
    reader = torch.distributed.checkpoint.FileSystemReader(folder)
    described = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(one.size, dtype=one.properties.dtype)
        for key, one in described.items()
        if isinstance(one, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2"])
def test_what_is_written_is_what_is_laid_by_hand(name, models, tmp_path):
    """Keys, tensors and what is beside them, read by torch; but for the padding of a table."""
    model, logits = models[name]
    model.save_pretrained(tmp_path / "hf")
    reported = convert.convert(
        ConvertConfig(str(tmp_path / "hf"), str(tmp_path / "d"), "torch-dist")
    )
    assert "equal bit for bit; logits equal" in reported
    written = tmp_path / "d" / "release"
    laid = lay(tmp_path / "laid", parts(model), tp=1) / "iter_0000012"
    ours, theirs = whole(written), whole(laid)
    theirs = {key: tensor for key, tensor in theirs.items() if "optimizer" not in key}
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        rows = VOCABULARY if "word_embeddings" in key or "output_layer" in key else None
        assert torch.equal(ours[key][:rows], tensor[:rows]), key
        assert ours[key].shape == tensor.shape
    states = set(read_foreign(written / ".metadata").others)
    assert "decoder.layers.mlp.linear_fc1._extra_state/shard_3_4" in states
    assert "output_layer._extra_state/shard_0_1" in states and len(states) == 4 * 4 + 1
    common = torch.load(written / "common.pt", weights_only=False)
    assert common["args"].ckpt_format == "torch_dist" and common["checkpoint_version"] == 3.0
    assert json.loads((written / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert difference(tmp_path / "d", logits) < 2e-5


def test_experts_are_written_by_layer(tmp_path):
    config = transformers.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2)
    model = built(config)
    model.save_pretrained(tmp_path / "hf")
    convert.convert(ConvertConfig(str(tmp_path / "hf"), str(tmp_path / "d"), "torch-dist"))
    ours, state = whole(tmp_path / "d" / "release"), model.state_dict()
    for i in range(4):
        here, there = f"decoder.layers.{i}.mlp.", f"model.layers.{i}.mlp."
        for key, name in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
            own = ours[f"{here}experts.experts.{key}.weight"]
            assert torch.equal(own, state[f"{there}experts.{name}"])
        assert f"decoder.layers.{i}.pre_mlp_layernorm.weight" in ours
    states = set(read_foreign(tmp_path / "d" / "release" / ".metadata").others)
    assert "decoder.layers.3.mlp.experts.experts.linear_fc2._extra_state/shard_3_4" in states


def test_torch_dist_has_no_ranks():
    with pytest.raises(ValueError, match="--tp is 2, but --to torch-dist is not split over ranks"):
        ConvertConfig("a", "b", "torch-dist", tp=2)


def test_a_description_of_megatrons_own_class(models, tmp_path, monkeypatch):
    """That of core 0.15, with what it adds, and with the path that it was saved to; the class need
    not be there when it is read.
    """
    name = "megatron.core.dist_checkpointing.strategies.torch"
    module = types.ModuleType(name)
    module.MCoreMetadata = type("MCoreMetadata", (Metadata,), {"__module__": name})
    model, logits = models["llama"]
    folder = lay(tmp_path, parts(model))
    file = folder / "iter_0000012" / ".metadata"
    found = pickle.loads(file.read_bytes())
    with monkeypatch.context() as patch:
        for i in range(1, name.count(".") + 1):
            above = ".".join(name.split(".")[:i])
            patch.setitem(sys.modules, above, types.ModuleType(above))
        patch.setitem(sys.modules, name, module)
        found.__class__ = module.MCoreMetadata
        found.mcore_data = {NORM: {"nd_reformulated_orig_global_shape": (32,)}}
        found.storage_meta = StorageMeta(checkpoint_id=tmp_path, modules=["a"])
        file.write_bytes(pickle.dumps(found))
    assert b"MCoreMetadata" in file.read_bytes() and b"PosixPath" in file.read_bytes()
    assert difference(folder, logits) < 2e-5
