"""`dolmen train pretrain --init MODEL --adapter.rank ...` from end to end in this process: what is
trained, what it leaves, and what reads that.
"""

import json
import shutil

import pytest
import tinyrun
import torch
from safetensors.torch import load_file, save_file
from tinyrun import dolmen

import dolmen as package
from dolmen.conversion import source
from dolmen.conversion.source import open_source

material, one_thread = tinyrun.material, tinyrun.one_thread
TARGETS = ("q_proj", "down_proj")


def words(material, *more) -> list:
    return [
        *("train", "pretrain", "--init", material.model),
        *("--data.path", material.docs, "--data.cache", material.folder / "cache"),
        *("--train.steps", 4, "--train.sequence-length", 16, "--train.global-batch-size", 4),
        *("--optimizer.lr", 1e-2, "--adapter.rank", 2, "--adapter.alpha", 8),
        *("--adapter.targets", *TARGETS, *more),
    ]


@pytest.fixture(scope="module")
def run(material, tmp_path_factory):
    out = tmp_path_factory.mktemp("adapters") / "run"
    arguments = words(material, "--out", out, "--finish.export", "--finish.verify")
    result = dolmen(*arguments, "--checkpoint.every", 2)
    assert result.code == 0, result.err
    return out, result.out


def test_a_run_tells_what_it_trains(run):
    """Two layers: of q 2 x (32 + 32), of down 2 x (48 + 32)."""
    reported = " ".join(run[1].split())
    assert "LoRA rank 2 trains 576" in reported
    assert "transformers computes the same logits, loss, gradients and text from it" in reported


def test_an_export_has_adapters_merged(run, material):
    out, _ = run
    before, after = (
        load_file(folder / "model.safetensors") for folder in (material.model, out / "hf")
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor) == (name.split(".")[-2] not in TARGETS), name
    kept = tinyrun.tensors(out, 4)
    for layer in range(2):
        part = f"model/layers.{layer}.attn.q"
        delta = 8 / 2 * kept[f"{part}.lora_B"] @ kept[f"{part}.lora_A"]
        whole = (kept[f"{part}.weight"] + delta).to(torch.bfloat16)
        assert torch.equal(after[f"model.layers.{layer}.self_attn.q_proj.weight"], whole)
    assert {n.rpartition(".")[2] for n in kept if not n.startswith("model/")} == {
        "lora_A",
        "lora_B",
    }


def test_a_run_is_read_as_the_merged_model(run, material, tmp_path):
    """By whatever reads a source, --init too."""
    out, _ = run
    source, exported = open_source(out), open_source(out / "hf")
    assert source.specs.keys() == exported.specs.keys()
    for name, tensor in source.stream():
        assert torch.equal(tensor.to(torch.bfloat16), exported.read(name)), name
    first = dolmen("generate", out, "--prompt", "abc", "--max-new-tokens", 4)
    second = dolmen("generate", out / "hf", "--prompt", "abc", "--max-new-tokens", 4)
    assert first.code == 0, first.err
    assert first.out == second.out
    again = [out if word == material.model else word for word in words(material)]
    result = dolmen(*again, "--out", tmp_path / "on", "--train.steps", 1)
    assert result.code == 0, result.err


def test_a_run_goes_on_with_its_own_adapters_alone(run, material):
    out, _ = run
    for option, said in (
        (("--adapter.rank", 4), "adapter.rank: 2 -> 4"),
        (("--adapter.alpha", 4), "adapter.alpha: 8.0 -> 4.0"),
        (("--adapter.targets", "q_proj"), "adapter.targets: ['down', 'q'] -> ['q']"),
    ):
        result = dolmen(*words(material), "--out", out, "--resume", *option)
        assert result.code == 2 and said in result.words, result.words
    result = dolmen(*words(material), "--out", out, "--resume", "--train.steps", 5)
    assert result.code == 0 and tinyrun.steps(out)[-1] == 5, result.err


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    """What the run has learned, as PEFT writes it, times 30: after four steps it is felt."""
    out = tmp_path_factory.mktemp("peft") / "adapters"
    result = dolmen("export", run[0], "--to", out, "--adapters")
    assert result.code == 0, result.err
    tensors = load_file(out / "adapter_model.safetensors")
    larger = {n: t * (30 if "lora_B" in n else 1) for n, t in tensors.items()}
    save_file(larger, out / "adapter_model.safetensors", metadata={"format": "pt"})
    return out


PROMPTS = ["abc def", "hij", "a b c d e f g h i j", "jjj"]
ASKED = ("--max-new-tokens", 8, "--dtype", "float32", "--logprobs")


@pytest.fixture(scope="module")
def wide(material, tmp_path_factory):
    """The base in fp32, beside which merged weights are not rounded."""
    out = tmp_path_factory.mktemp("wide") / "model"
    result = dolmen("export", material.model, "--to", out, "--dtype", "float32")
    assert result.code == 0, result.err
    return out


def alone(source) -> list:
    """What a source writes by itself: with its adapters merged."""
    return package.load(source, dtype="float32").generate(PROMPTS, max_new_tokens=8)


def test_rows_of_a_file_name_adapters(run, folder, wide, tmp_path):
    """Each is answered as by the model that has that one merged; so it is from Python."""
    said = json.loads((folder / "adapter_config.json").read_text())
    merged = tmp_path / "merged"
    shutil.copytree(folder, merged)
    said["base_model_name_or_path"] = str(wide)
    (merged / "adapter_config.json").write_text(json.dumps(said))
    want = {"run": alone(run[0]), "peft": alone(merged), None: alone(wide)}
    assert len({tuple(each[0].logprobs) for each in want.values()}) == 3
    given = [
        {"prompt": prompt, "adapter": name} for prompt in PROMPTS for name in ("run", None, "peft")
    ]
    given += [{"prompt": prompt} for prompt in PROMPTS]
    rows, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in given))
    adapters = ("--adapters", f"run={run[0]}", f"peft={folder}")
    arguments = ("generate", wide, "--input", rows, "--output", out, *ASKED)
    result = dolmen(*arguments, *adapters, "--adapter", "peft")
    assert result.code == 0, result.err
    found = [json.loads(line) for line in out.read_text().splitlines()]
    for row, answer in zip(given, found, strict=True):
        assert {name: answer[name] for name in row} == row
        one = want[row.get("adapter", "peft")][PROMPTS.index(row["prompt"])]
        assert answer["tokens"] == one.tokens
        assert answer["logprobs"] == pytest.approx(one.logprobs, abs=1e-5)
    named = {"run": run[0], "peft": folder}
    model = package.load(wide, dtype="float32", adapters=named)
    mixed = model.generate(PROMPTS, max_new_tokens=8, adapter=["peft", None, "run", "peft"])
    assert [one.tokens for one in mixed] == [
        want[name][i].tokens for i, name in enumerate(("peft", None, "run", "peft"))
    ]
    result = dolmen(
        "generate", wide, "--prompt", "abc def", *ASKED[:4], *adapters, "--adapter", "run"
    )
    assert result.out == str(want["run"][0]) + "\n"
    with pytest.raises(ValueError, match="adapter has 1 name for 4 prompts"):
        model.generate(PROMPTS, adapter=["run"])
    with pytest.raises(ValueError, match="no adapter 'x': name one of peft, run"):
        package.generate(wide, "a", adapters=named, adapter="x")


def test_adapters_that_are_not_of_the_base_are_refused(run, folder, wide, tmp_path):
    """Before any work: nothing is written."""
    rows, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "b", "adapter": "law"}\n')
    other = tmp_path / "other"
    shutil.copytree(wide, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] *= 1.1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    of_rank_3 = tmp_path / "rank"
    shutil.copytree(folder, of_rank_3)
    said = json.loads((folder / "adapter_config.json").read_text())
    (of_rank_3 / "adapter_config.json").write_text(json.dumps(said | {"r": 3}))
    fr = ("--adapters", f"fr={folder}")
    for model, words, reported in (
        (wide, fr, "in.jsonl, line 2: there is no adapter 'law': name one of fr"),
        (wide, (), "line 2: there is no adapter 'law': give --adapters NAME=FOLDER"),
        (wide, (*fr, "--adapter", "law"), "there is no adapter 'law': name one of fr"),
        (wide, ("--adapters", f"law={of_rank_3}"), "adapter law: "),
        (
            wide,
            ("--adapters", f"law={of_rank_3}"),
            "rank 3 with a weight of [32, 32] implies [3, 32]",
        ),
        (wide, ("--adapters", f"law={wide}"), f"{wide} has no adapters: give a folder"),
        (wide, ("--adapters", "law"), "adapters has 'law': use --adapters NAME=FOLDER"),
        (wide, ("--adapters", f"law={tmp_path / 'no'}"), "adapter law: "),
        (other, ("--adapters", f"law={run[0]}"), "layers.0.attn.q.weight differs by 0.091 of its"),
    ):
        result = dolmen("generate", model, "--input", rows, "--output", out, *words)
        assert result.code == 2 and reported in result.words, result.words
        assert not out.exists()
    result = dolmen("generate", wide, "--input", rows, "--output", out, *fr, "--skip-bad")
    assert result.code == 0 and "1 row skipped" in result.err, result.err


def test_the_base_of_a_run_is_known_by_what_it_computes(run, wide, tmp_path):
    """Fields that only training or its start uses may be others in its config.json."""
    for field, value, said in (
        ("initializer_range", 0.5, None),
        (
            "rms_norm_eps",
            0.5,
            "to another model than .*: rms_norm_eps is .* in the one, 0.5 in the other",
        ),
    ):
        other = tmp_path / field
        shutil.copytree(wide, other)
        content = json.loads((other / "config.json").read_text())
        assert content[field] != value
        (other / "config.json").write_text(json.dumps(content | {field: value}))
        if said is None:
            assert source.open_adapters(run[0], open_source(other)).form.rank == 2
            continue
        with pytest.raises(ValueError, match=said):
            source.open_adapters(run[0], open_source(other))


def test_a_run_on_weights_of_eight_bits(material, tmp_path):
    """It holds them so, in its checkpoints too; what reads it reads the weights that it has trained
    with, restored, and adapters merged into those.
    """
    arguments = words(material, "--adapter.frozen", "int8", "-v", "--out", tmp_path / "run")
    result = dolmen(*arguments, "--finish.export", "--finish.verify")
    assert result.code == 0, result.err
    reported = " ".join(result.out.split())
    # two layers of q, k, v, o: 32 x (32 + 16 + 16 + 32), gate, up, down: 3 x 32 x 48; 7 scales
    assert "61.4 kB of the frozen ones are stored in int8 (17.2 kB)" in reported
    assert "kernels attention by blocks, norms" in reported, "-v, and no experts of a dense model"
    assert "GFLOP per token" in reported and "(LoRA rank " in reported
    assert "transformers computes the same logits, loss, gradients and text from it" in reported
    kept = tinyrun.tensors(tmp_path / "run", 4)
    after = load_file(tmp_path / "run/hf/model.safetensors")
    for ours, theirs in {"attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj"}.items():
        part = f"model/layers.1.{ours}"
        assert kept[f"{part}.weight"].dtype == torch.int8
        whole = kept[f"{part}.weight"] * kept[f"{part}.weight_scale"][:, None]
        if ours == "attn.q":
            whole = whole + 8 / 2 * kept[f"{part}.lora_B"] @ kept[f"{part}.lora_A"]
        assert torch.equal(after[f"model.layers.1.{theirs}.weight"], whole.to(torch.bfloat16))
    result = dolmen(*arguments, "--resume", "--train.steps", 5)
    assert result.code == 0 and tinyrun.steps(tmp_path / "run")[-1] == 5, result.err
    result = dolmen(*words(material), "--out", tmp_path / "run", "--resume")
    assert result.code == 2 and "adapter.frozen: int8 -> whole" in result.words, result.words


def test_adapters_that_cannot_be_are_refused(material, tmp_path):
    for more, said in {
        ("--adapter.rank", 0): "adapter.rank is 0: it must be at least 1",
        (
            "--adapter.rank",
            10**12,
        ): "adapter.rank is 1000000000000: the matrices of adapter.targets",
        ("--adapter.targets", "q_proj", "wq"): "choose from q_proj, k_proj, v_proj, o_proj, gate",
        ("--adapter.targets", "lm_head"): "adapters of the LM head",
        ("--optimizer.name", "muon"): "use --optimizer.name adamw",
        (
            "--adapter.frozen",
            "int8",
            "--train.precision",
            "fp8-rowwise",
        ): "leave out one of the two",
        ("--train.router.balance", "bias"): "use --train.router.balance loss, or none",
    }.items():
        result = dolmen(*words(material), "--out", tmp_path / "out", *more)
        assert result.code == 2 and said in result.words, result.words
        assert not (tmp_path / "out").exists()
    result = dolmen("train", material.file, "--out", tmp_path / "out", "--adapter.rank", 2)
    assert result.code == 2 and "are random: give --init" in result.words
