"""`dolmen convert`: what is written is, to the bit, what laid.py lays by hand; it is proved before
it stands there, and nothing stands there that is not whole.
"""

import argparse
import shutil
import threading
from hashlib import sha256
from types import SimpleNamespace

import pytest
import torch
import transformers
from laid import LOCAL, OF_2023, TE, How, lay
from test_megatron_read import GPT2, LLAMA, VOCABULARY, built, parts
from torch.multiprocessing.reductions import StorageWeakRef

from dolmen.conversion import convert
from dolmen.conversion.config import ConvertConfig
from dolmen.conversion.megatron import export, shares
from dolmen.conversion.source import open_source
from dolmen.conversion.writing import LayerPool, group_by_layer
from dolmen.families import ModelConfig
from dolmen.files.safetensors import Stored
from dolmen.files.torch_files import TorchFileWriter


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Directories of transformers, not to be written into, and the models in them."""
    made = {
        "llama": built(transformers.LlamaConfig(**LLAMA)),
        "tied": built(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
        "mixtral": built(transformers.MixtralConfig(**LLAMA, num_local_experts=4)),
        "gpt2": built(transformers.GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2)),
    }
    where = tmp_path_factory.mktemp("models")
    for name, model in made.items():
        model.save_pretrained(where / name)
    return where, made


def run(source, to, format, **options) -> str:
    return convert.convert(ConvertConfig(str(source), str(to), format, **options))


CASES = {
    "older, tp 2": ("llama", "megatron", OF_2023, How(OF_2023, 3.0, 2, [[4]])),
    "older, gpt2, stages": ("gpt2", "megatron", OF_2023, How(OF_2023, 3.0, 2, [[2, 2]])),
    "older, tied, virtual": ("tied", "megatron", OF_2023, How(OF_2023, 3.0, 1, [[1, 1], [1, 1]])),
    "core, local": ("llama", "megatron-core", LOCAL, How(LOCAL, 3.0, 2, [[2, 2]])),
    "core, te": ("llama", "megatron-core", TE, How(TE, 3.0, 2, [[4]])),
    "core, te, tied, virtual": ("tied", "megatron-core", TE, How(TE, 3.0, 2, [[1, 1], [1, 1]])),
    "core, experts": ("mixtral", "megatron-core", LOCAL, How(LOCAL, 3.0, 2, [[2, 2]])),
    "core, te, experts": ("mixtral", "megatron-core", TE, How(TE, 3.0, 2, [[2, 2]])),
    "core, experts over ep": ("mixtral", "megatron-core", LOCAL, How(LOCAL, 3.0, 1, [[4]], ep=4)),
    "core, te, over ep": ("mixtral", "megatron-core", TE, How(TE, 3.0, 2, [[2, 2]], ep=2)),
    "core, te, gpt2": ("gpt2", "megatron-core", TE, How(TE, 3.0, 1, [[4]])),
}


@pytest.mark.parametrize("there", [True, False])
def test_a_destination_that_is_a_link(there, folders, tmp_path):
    """It goes on being one."""
    if there:
        (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    run(folders[0] / "tied", tmp_path / "link", "hf")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk/config.json").is_file()


def flat(value, name=""):
    if isinstance(value, dict):
        return {
            n: t for key, inner in value.items() for n, t in flat(inner, f"{name}.{key}").items()
        }
    return {name: value}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_is_laid_by_hand(case, folders, tmp_path):
    name, format, names, how = CASES[case]
    where, models = folders
    spec = {"spec": "local"} if names is LOCAL else {}
    ranks = dict(tp=how.tp, pp=how.pp, virtual_stages=len(how.stages), ep=how.ep)
    said = run(where / name, tmp_path / "out", format, **ranks, **spec)
    was = f"{where / name}, a transformers directory"
    assert said.startswith(f"read {was}\nwrote {tmp_path / 'out'}: ")
    assert said.endswith("parameters read back, equal bit for bit; logits equal")
    made = parts(models[name])
    how.iteration = "release"
    byhand = lay(tmp_path / "laid", made, how) / "release"
    written = tmp_path / "out/release"
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "release"
    assert [p.name for p in sorted(written.iterdir())] == [p.name for p in sorted(byhand.iterdir())]
    for rank in written.iterdir():
        ours = torch.load(rank / "model_optim_rng.pt", weights_only=False)
        theirs = torch.load(byhand / rank.name / "model_optim_rng.pt", weights_only=False)
        assert type(ours["args"]) is argparse.Namespace and ours["checkpoint_version"] == 3.0
        for option, value in vars(theirs["args"]).items():
            other = {"norm_epsilon": "layernorm_epsilon"}.get(option, option)
            found = vars(ours["args"])[other]
            if option == "num_query_groups" and not vars(ours["args"])["group_query_attention"]:
                continue
            assert found == value, option
        models_ = [key for key in ours if key.startswith("model")]
        assert models_ == [key for key in theirs if key.startswith("model")]
        for key in models_:
            one, other = flat(ours[key]), flat(theirs[key])
            # of the head, which is a module of core beside its weight; laid.py has those of layers
            extra = {n for n in one if n.endswith("output_layer._extra_state")}
            assert one.keys() - extra == other.keys()
            for tensor, expected in other.items():
                same(tensor, one[tensor], expected, int(rank.name[8:10]), how)


def same(name, ours, expected, rank, how):
    if expected is None:
        assert ours is None, name
        return
    assert ours.shape == expected.shape and ours.dtype == expected.dtype, name
    rows = len(ours)
    if "embeddings" in name and "position" not in name or "output" in name or "for_head" in name:
        rows = max(0, min(rows, VOCABULARY - rank * rows))  # the others are padding
    assert torch.equal(ours[:rows], expected[:rows]), name


@pytest.mark.slow
@pytest.mark.parametrize("format", ["megatron", "megatron-core"])
def test_there_and_back(format, folders, tmp_path):
    """Every tensor to the bit, config.json and tokenizer with it; opened by the iteration's folder
    too; padding is gone.
    """
    where, _ = folders
    source = tmp_path / "hf"
    source.mkdir()
    for file in (where / "gpt2").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "vocab.txt").write_text("a")
    run(source, tmp_path / "there", format, tp=2, pp=2)
    again = open_source(tmp_path / "there/release")
    assert again.model.config == open_source(source).model.config
    assert again.tokenizer == tmp_path / "there"
    assert again.specs == open_source(source).specs
    run(tmp_path / "there", tmp_path / "back", "hf")
    assert (tmp_path / "back/vocab.txt").read_text() == "a"
    for name, tensor in open_source(source).stream():
        assert torch.equal(open_source(tmp_path / "back").read(name), tensor), name
    assert open_source(tmp_path / "back").model.config == open_source(source).model.config


@pytest.mark.slow
@pytest.mark.parametrize("format", ["megatron-core", "torch-dist"])
def test_a_release_stays_one(format, folders, tmp_path):
    """Its files say iteration 0, and Megatron reads no tracker that does."""
    where, _ = folders
    run(where / "tied", tmp_path / "there", format)
    run(tmp_path / "there", tmp_path / "again", format)
    for written in (tmp_path / "there", tmp_path / "again"):
        assert (written / "latest_checkpointed_iteration.txt").read_text() == "release"
        assert open_source(written).iteration == 0


def test_half_of_the_bytes(folders, tmp_path):
    """In another dtype; the proof is of what was written."""
    where, _ = folders
    run(where / "llama", tmp_path / "out", "megatron-core", dtype="bfloat16")
    written = open_source(tmp_path / "out")
    assert written.model.dtype == "bfloat16"
    for name, tensor in open_source(where / "llama").stream():
        assert torch.equal(written.read(name), tensor.bfloat16()), name


def test_a_layer_at_a_time(folders, monkeypatch):
    """Where both models do not fit, the same is compared behind every layer."""
    where, _ = folders
    source = open_source(where / "tied")
    assert convert.compare_logits(source, source, room=0) == "logits equal block by block"
    held, real = [], convert.Decoder.forward
    monkeypatch.setattr(
        convert.Decoder,
        "forward",
        lambda self, *a, **k: held.append(len(self.layers)) or real(self, *a, **k),
    )
    convert.compare_logits(source, source, room=0)
    assert held == [1] * 8


@pytest.mark.parametrize("format", ["megatron", "hf"])
def test_one_tensor_per_thread_is_in_memory(format, folders, tmp_path, monkeypatch):
    """Of what is written, read back and compared: the parts of one stored tensor, whole and on each
    rank, of source and target.
    """
    where, _ = folders
    source, options = where / "llama", dict(tp=2, threads=1)
    if format == "hf":
        source, options = tmp_path / "ranks", dict(threads=1)
        run(where / "llama", source, "megatron", tp=2)
    made, held, read = {}, [], Stored.read

    def read_alone(self):
        held.append(sum(size for reference, size in made.items() if not reference.expired()))
        made[StorageWeakRef((tensor := read(self)).untyped_storage())] = self.spec.nbytes
        return tensor

    monkeypatch.setattr(Stored, "read", read_alone)
    monkeypatch.setattr(convert, "compare_logits", lambda *_: "logits equal")
    run(source, tmp_path / "out", format, **options)
    largest = 4 * 256 * 32  # the embedding with its padding, as ranks have it
    whole = sum(spec.nbytes for spec in open_source(where / "llama").specs.values())
    assert len(made) > 80 and max(held) <= largest < whole / 3


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "llama",
            dict(to="megatron", tp=3),
            r"num_attention_heads \(4\) is not divisible by --tp 3",
        ),
        ("llama", dict(to="megatron-core", tp=4), r"num_key_value_heads \(2\) .* --tp 4: .* as 2"),
        ("llama", dict(to="megatron", pp=3), r"num_hidden_layers \(4\) is not divisible by --pp 3"),
        ("llama", dict(to="megatron", pp=0), "--pp is 0: it must be at least 1"),
        ("llama", dict(to="megatron", virtual_stages=2), "set --pp to 2 or more"),
        ("llama", dict(to="hf", tp=2), "--tp is 2, but --to hf is not split over ranks"),
        ("llama", dict(to="megatron-core", ep=2), "--ep is 2, but the model has no experts"),
        ("mixtral", dict(to="megatron-core", ep=3), r"experts \(4\) is .* --ep 3: .* such as 2"),
        (
            "mixtral",
            dict(to="torch-dist", ep=2),
            "--ep is 2, but --to torch-dist is not split over ranks",
        ),
        ("llama", dict(to="hf", virtual_stages=2), "--virtual-stages is 2, but --to hf"),
        ("llama", dict(to="megatron", spec="te"), "--spec is te: only --to megatron-core"),
        ("llama", dict(to="hf", vocab_size=62), "--vocab-size is 62, but .* has 61"),
    ],
)
def test_what_cannot_be_whole_is_refused_before_it_is_written(
    name, options, said, folders, tmp_path
):
    where, _ = folders
    with pytest.raises(ValueError, match=said):
        run(where / name, tmp_path / "out", options.pop("to"), **options)
    assert not any(tmp_path.iterdir())


def test_a_model_that_megatron_does_not_compute(folders, tmp_path):
    config = transformers.LlamaConfig(
        **LLAMA, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    )
    built(config).save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match="before Megatron-Core cannot compute rope_theta = 500000"):
        run(tmp_path / "m", tmp_path / "out", "megatron")
    run(tmp_path / "m", tmp_path / "out", "megatron-core")
    window = transformers.MistralConfig(**LLAMA, sliding_window=5)
    built(window).save_pretrained(tmp_path / "w")
    with pytest.raises(ValueError, match="sliding_window = 5"):
        run(tmp_path / "w", tmp_path / "old", "megatron")
    run(tmp_path / "w", tmp_path / "new", "megatron-core")
    assert open_source(tmp_path / "new").spec.blocks[0].mixer.window == 5
    biased = transformers.LlamaConfig(**LLAMA, attention_bias=True)
    built(biased).save_pretrained(tmp_path / "b")
    with pytest.raises(
        ValueError, match="Megatron-Core cannot compute biases of the feed-forward layer = False"
    ):
        run(tmp_path / "b", tmp_path / "bias", "megatron-core")


def test_what_is_broken_off_leaves_nothing(folders, tmp_path, monkeypatch):
    where, _ = folders
    real, written = TorchFileWriter.write, []

    def stop(self, name, tensor):
        written.append(name)
        if len(written) == 20:
            raise KeyboardInterrupt
        real(self, name, tensor)

    monkeypatch.setattr(TorchFileWriter, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        run(where / "llama", tmp_path / "out", "megatron", tp=2)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["hf", "megatron", "megatron-core", "torch-dist"])
def test_what_kill_leaves_opens_as_no_model(format, folders, tmp_path, monkeypatch):
    """As all lies there when everything is written and compared, by the name that it has then."""
    where, _ = folders
    real = convert.compare_logits

    def copied(*given):
        shutil.copytree(tmp_path / "a", tmp_path / "left")
        return real(*given)

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(convert, "compare_logits", copied)
    run(where / "tied", tmp_path / "a/out", format)
    assert open_source(tmp_path / "a/out").iteration in (None, 0)
    (left,) = (tmp_path / "left").iterdir()
    for folder in (left, *(path for path in left.rglob("*") if path.is_dir())):
        with pytest.raises(
            ValueError, match=f"belongs to an interrupted conversion: .*, and remove {left}"
        ):
            open_source(folder)
    written = left / "out"
    known = ["config.json", "latest_checkpointed_iteration.txt"]
    assert not any((written / name).exists() for name in known)
    assert any(path.stat().st_size > 10_000 for path in written.rglob("*"))


def test_what_is_not_the_same_is_seen_and_not_left(folders, tmp_path, monkeypatch):
    where, _ = folders
    real = shares.Share.cut

    def wrong(self, tensor, rank, size):
        return real(shares.Share(self.dim), tensor, rank, size)

    monkeypatch.setattr(export.shares.Share, "cut", wrong)
    with pytest.raises(convert.Unlike, match=r"layers\.\d\.mlp\.gate\.weight has changed in"):
        run(where / "llama", tmp_path / "out", "megatron", tp=2)
    assert not any(tmp_path.iterdir())


def test_a_parameter_that_one_of_two_models_lacks_is_named():
    source = SimpleNamespace(specs=dict.fromkeys("gfedcba"), where="A")
    with pytest.raises(convert.Unlike, match=r"has other parameters than A: \['a', 'b', 'c'\]"):
        next(convert.compare_weights(source, SimpleNamespace(specs={"g": None})))


def test_other_logits_are_seen(folders, tmp_path):
    """Of equal weights: another function, as other options would make it."""
    where, _ = folders
    source = open_source(where / "tied")
    other = source.read_as(ModelConfig(source.model.config | {"rms_norm_eps": 1e-5}))
    for room, said in ((convert.ROOM, "logits of"), (0, "hidden vectors behind layer 0 of")):
        with pytest.raises(
            convert.Unlike, match=f"{said} .* differ from those of .*, by up to \\d"
        ):
            convert.compare_logits(source, other, room)


def test_padding_is_the_last_row_again(folders, tmp_path):
    """As Megatron's own converter has it: a softmax that counts it does not see a logit of 0."""
    where, _ = folders
    run(where / "llama", tmp_path / "out", "megatron-core")
    file = tmp_path / "out/release/mp_rank_00/model_optim_rng.pt"
    held = torch.load(file, weights_only=False)["model"]["output_layer.weight"]
    assert len(held) == 128 and bool((held[VOCABULARY:] == held[VOCABULARY - 1]).all())


def test_a_folder_that_is_taken(folders, tmp_path):
    where, _ = folders
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ValueError, match="exists and is not empty"):
        run(where / "llama", tmp_path, "megatron")


def hashes(folder) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format", "options"),
    [
        ("tied", "megatron-core", dict(tp=2, pp=2)),
        ("mixtral", "torch-dist", {}),
        ("mixtral", "hf", {}),
    ],
)
def test_several_threads_write_the_same_bytes(name, format, options, folders, tmp_path):
    where, _ = folders
    for threads in (1, 4):
        run(where / name, tmp_path / str(threads), format, **options, threads=threads)
    assert len(hashes(tmp_path / "1")) > 2 and hashes(tmp_path / "1") == hashes(tmp_path / "4")


def test_parts_run_at_once_and_progress_is_their_sum():
    meeting, shown = threading.Barrier(3, timeout=20), []

    def work(part, advance):
        meeting.wait()
        advance(part)

    LayerPool(3, shown.append).run(work, [1, 2, 3, 1, 2, 3])
    assert sorted(shown) == shown and shown[-1] == 12


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_first_failure_ends_all_threads(error):
    """A part that has begun ends at its next tensor, and the others do not begin."""
    meeting, started, whole = threading.Barrier(2, timeout=20), [], []

    def work(part, advance):
        started.append(part)
        if part < 2:
            meeting.wait()
        if part == 1:
            raise error("the second part fails")
        for _ in range(100_000):
            advance(1)
        whole.append(part)

    with pytest.raises(error, match="the second part fails"):
        LayerPool(2).run(work, range(100))
    assert not whole and len(started) < 100


def test_neighbours_of_a_layer_are_one_part():
    names = ["embedding", "layers.0.a", "layers.0.b", "layers.10.a", "norm", "head"]
    assert group_by_layer(names, str) == [names[:1], names[1:3], names[3:4], names[4:]]
    with pytest.raises(ValueError, match="--threads is 0: it must be at least 1"):
        ConvertConfig("a", "b", "hf", threads=0)
