"""The rules across sections, on the recipes and on what a person may set."""

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tinyrun
import yaml
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from dolmen import families
from dolmen.cli.runs import parse_run
from dolmen.conversion import hf
from dolmen.core.config import to_dict
from dolmen.core.torch_private import compute
from dolmen.data.config import DataConfig
from dolmen.data.inputs import Inputs
from dolmen.data.sources import DataSource, resolve_sources
from dolmen.evaluation.config import DuringConfig
from dolmen.families import edit
from dolmen.model import count
from dolmen.model.layout import Layout
from dolmen.objectives.config import ObjectiveConfig
from dolmen.ops.numerics import Fp8Config
from dolmen.optim.config import MuonConfig
from dolmen.planning.config import DryrunRequest
from dolmen.recipes import RECIPES
from dolmen.recipes.overrides import build_request
from dolmen.rl.config import CriticConfig, PPOConfig, RolloutConfig
from dolmen.training import worker
from dolmen.training.checks import rollout
from dolmen.training.checks.folder import check_overwrite, check_same_model, check_same_optimizer
from dolmen.training.checks.rollout import check_group_size, check_rollout
from dolmen.training.checks.run import check_exportable, check_layout, validate_computation
from dolmen.training.config import FinishConfig, RunConfig, TrainConfig
from dolmen.training.evaluate import read_prompts
from dolmen.training.request import write_config
from dolmen.training.resolve import Data, ResolvedRun, resolve, resolve_model
from dolmen.training.start import changes_since

material, one_thread = tinyrun.material, tinyrun.one_thread

# parameters, and a layout of the size it is trained at
SIZES = {
    "llama-1b": (1.24e9, Layout(dp=8)),
    "llama-8b": (8.03e9, Layout(tp=8, dp=16, sequence_parallel=True)),
    "llama-70b": (70.6e9, Layout(tp=8, dp=64, zero=3, sequence_parallel=True)),
    "gpt3-175b": (175e9, Layout(tp=8, dp=192, zero=3, sequence_parallel=True)),
    "mixtral-8x7b": (46.7e9, Layout(dp=64, tp=2, ep=8, zero=1, sequence_parallel=True)),
    "qwen3-30b-a3b": (30.5e9, Layout(dp=128, ep=32, zero=2)),
    "bert": (110.1e6, Layout(dp=16, zero=1)),
    "quickstart": (4.00e6, Layout(dp=2)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_run(name, material):
    """On one process and at its own size, of text that is there; those without a model take
    any.
    """
    run = RECIPES[name]()
    text = {"path": (str(material.docs),), "tokenizer": str(material.tokenizer)}
    run = replace(run, data=DataConfig(rows=run.data.rows, **text))
    assert run.name == name and RECIPES[name].__doc__
    if run.model is None:
        assert name in ("pretrain", "sft", "reward", "dpo", "grpo", "continue-language")
        run = replace(run, model=material.config().model, init=str(material.model))
    if name in ("grpo", "ppo"):  # what it is for, nobody knows but its user
        run = replace(run, reward=("exact",))
    if name == "continue-language":
        new = replace(run.train.new_rows, first=290)
        run = replace(run, train=replace(run.train, new_rows=new))
    for layout in (Layout(), SIZES.get(name, (0, Layout(dp=4)))[1]):
        done = tinyrun.check_run(replace(run, layout=layout), None)
        assert (
            done.layout.dp == (layout.dp or 1)
            and done.train.global_batch_size // done.layout.dp % done.microbatch_size == 0
        )
    if name in SIZES:
        assert count.parameters(run.model.spec) == pytest.approx(SIZES[name][0], rel=0.01)


def test_flops_count_the_experts_that_compute():
    """12.9 and 3.3 B parameters a token (the model cards), of which the embedding is no product; at
    length 1 attention is nothing.
    """
    for name, active in (
        ("mixtral-8x7b", 12.88e9 - 32000 * 4096),
        ("qwen3-30b-a3b", 3.35e9 - 151936 * 2048),
    ):
        assert count.training_flops_per_token(RECIPES[name]().model.spec, 1) / 6 == pytest.approx(
            active, rel=0.01
        )


@pytest.mark.parametrize("options", [dict(sample="The"), dict(compressors=True)])
def test_what_fills_in_tokens_ends_in_no_text(material, options):
    run = replace(
        RECIPES["bert"](),
        data=DataConfig(path=(str(material.docs),), tokenizer=str(material.tokenizer)),
        finish=FinishConfig(export=True, **options),
    )
    with pytest.raises(ValueError, match=f"finish.{min(options)} is for causal language models"):
        tinyrun.check_run(replace(run, layout=Layout()), None)


def test_defaults(material):
    """The smaller of 512 and the model's maximum; eight sequences; the most that 4,096 tokens at
    once allow.
    """
    run = RunConfig(model=material.config().model)
    assert (
        run.sequence_length == 64 and run.train.global_batch_size == 8 and run.microbatch_size == 8
    )
    long = replace(run, model=edit(run.model, context=8192))
    assert (
        long.sequence_length == 512
        and replace(long, train=TrainConfig(global_batch_size=12)).microbatch_size == 6
    )
    assert replace(long, layout=Layout(dp=4)).microbatch_size == 2
    assert replace(long, train=TrainConfig(sequence_length=8192)).microbatch_size == 1
    assert replace(long, train=TrainConfig(microbatch_size=3)).microbatch_size == 3


@pytest.mark.parametrize(
    "layout, processes, dp",
    [
        (Layout(), None, 1),
        (Layout(tp=2), None, 1),
        (Layout(), 4, 4),
        (Layout(tp=2), 4, 2),
        (Layout(dp=2), None, 2),
    ],
)
def test_dp_is_what_the_processes_leave(layout, processes, dp):
    assert layout.resolve(processes) == replace(layout, dp=dp)


@pytest.mark.parametrize(
    "layout, processes, said",
    [
        (Layout(tp=2), 3, "layout.tp (2) is not a divisor of the 3 processes: set --layout.tp 1"),
        (
            Layout(tp=4),
            2,
            "layout.tp (4) is not a divisor of the 2 processes: set --layout.tp 2, or ",
        ),
        (Layout(tp=2, pp=2), 6, "layout.tp (2) x layout.pp (2) = 4 is not a divisor of the 6"),
        (Layout(tp=2, dp=2), 2, "layout.tp (2) x layout.dp (2) = 4 processes, but there are 2"),
    ],
)
def test_processes_that_do_not_divide(layout, processes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        layout.resolve(processes)


def test_another_model_is_named_field_by_field(material):
    run = material.config()
    saved = to_dict(run)
    saved["model"] |= {"rope_theta": 5.0, "hidden_size": 64, "mystery": 1}
    saved["train"]["dropout"] = 0.5
    with pytest.raises(ValueError) as refusal:
        check_same_model(saved, run, 7)
    assert (
        "checkpoint of step 7 belongs to another model (model.hidden_size: 64 -> 32; "
        "model.rope_parameters.rope_theta: 5.0 -> 10000.0)" in str(refusal.value)
    )
    saved["model"] |= {"rope_theta": 10000.0, "hidden_size": 32, "initializer_range": 0.5}
    check_same_model(saved, run, 7)  # dropout, initial values and what is unknown may change
    moved = to_dict(replace(run, model=families.convert_family(run.model, "mistral")))
    with pytest.raises(ValueError, match=r"\(model.model_type: mistral -> llama; model"):
        check_same_model(moved, run, 7)
    saved["model"]["model_type"] = "made-up"
    with pytest.raises(ValueError, match="belongs to another model .model_type is 'made-up'"):
        check_same_model(saved, run, 7)


def test_routers_with_a_bias_are_another_model(material):
    """They have a parameter more."""
    biased = material.config(model=EXPERTS, train={"router": {"balance": "bias"}})
    plain = material.config(model=EXPERTS)
    with pytest.raises(ValueError, match="train.router.balance: bias -> loss or none"):
        check_same_model(to_dict(biased), plain, 7)
    check_same_model(to_dict(biased), biased, 7)
    with pytest.raises(ValueError, match="--train.router.balance loss to export"):
        tinyrun.check_run(replace(biased, finish=FinishConfig(export=True)), None)
    check_exportable(plain)


def test_another_optimizer_is_refused_with_the_knob(material):
    """Its state is of other kinds. A checkpoint that names none is of AdamW: there was no other."""
    plain, muon = material.config(), material.config(optimizer={"name": "muon"})
    nameless = to_dict(plain)
    del nameless["optimizer"]["name"]
    for saved, run, name in ((to_dict(muon), plain, "muon"), (nameless, muon, "adamw")):
        with pytest.raises(
            ValueError, match=f"optimizer state of {name}.* --optimizer.name {name}"
        ):
            check_same_optimizer(saved, run, 7)
    for saved, run in ((to_dict(muon), muon), (nameless, plain), ({}, plain)):
        check_same_optimizer(saved, run, 7)
    other = replace(muon.optimizer, lr=1.0, muon=MuonConfig(momentum=0.5))
    check_same_optimizer(to_dict(muon), replace(muon, optimizer=other), 7)


def test_compiled_blocks_need_a_schedule_that_computes_backward_at_once(material):
    train = {"global_batch_size": 8, "microbatch_size": 1, "compile": True}
    for schedule, refused in (("zero-bubble", True), ("1f1b", False)):
        run = material.config(layout={"pp": 2, "schedule": schedule}, train=train)
        match = f"train.compile and layout.schedule {schedule} exclude each other"
        with pytest.raises(ValueError, match=match) if refused else nullcontext():
            check_layout(run)
        check_layout(replace(run, train=replace(run.train, compile=False)))


def test_what_equal_rewards_or_no_prompt_would_make_useless_is_refused(tmp_path):
    alone = RolloutConfig(num_generations=1, advantage_estimator="reinforce-plus-plus")
    check_group_size(alone)
    with pytest.raises(ValueError, match=r"max-resamples \(2\) replaces groups with equal rewards"):
        check_group_size(replace(alone, max_resamples=2))
    check_group_size(replace(alone, max_resamples=2, num_generations=2))
    with pytest.raises(ValueError, match="must be at least 2: rollout.advantage-estimator grpo"):
        check_group_size(replace(alone, advantage_estimator="grpo"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(" \n\n")
    with pytest.raises(ValueError, match="no line has a prompt"):
        read_prompts(str(prompts))
    prompts.write_text("a\n\n b\n")
    assert read_prompts(str(prompts)) == ["a", " b"]
    with pytest.raises(ValueError, match="train.fp8.margin is set, but 8-bit training is off"):
        TrainConfig(fp8=Fp8Config(margin=1))


def test_what_rollouts_need_of_the_device_is_known_before_a_run_starts(material, monkeypatch):
    """--train.device auto is the CPU, or a GPU, by what this machine has."""
    options = {"importance_sampling_cap": 2.0, "epochs": 1}
    run = material.config(
        data={"rows": "prompts", "path": (str(material.docs),)},
        objective={"name": "grpo"},
        reward=("stub",),
        train={"device": "auto"},
    )
    monkeypatch.setattr(compute, "find_compiler", lambda: "")
    cases = ((0, {"compile": True}, "a C.. compiler"), (1, {"weights": "int8"}, "only on a CPU"))
    for gpus, more, match in cases:
        for visible in (0, 1):
            monkeypatch.setattr(rollout, "visible_gpus", lambda choice, visible=visible: visible)
            found = replace(run, rollout=RolloutConfig(**options, **more))
            with pytest.raises(ValueError, match=match) if visible == gpus else nullcontext():
                check_rollout(ResolvedRun(found, found))


def test_a_dry_run_compares_the_critic_with_the_model(material, tmp_path):
    shape: dict[str, Any] = {**tinyrun.MODEL, "intermediate_size": 64}
    wide = LlamaConfig(**shape)
    LlamaForCausalLM(wide).save_pretrained(tmp_path)
    ppo = {"objective": {"name": "ppo"}, "reward": ["stub"], "data": {"rows": "prompts"}}
    run = material.config(**ppo, rollout={"num_generations": 1, "max_new_tokens": 4})
    for init, same in ((material.model, True), (tmp_path, False)):
        config = replace(run, critic=CriticConfig(init=str(init)))
        with nullcontext() if same else pytest.raises(ValueError, match="another shape than the"):
            validate_computation(resolve(config, None, reads_init=False))


READ = {
    "critic.init": lambda read: {"critic": CriticConfig(init=read)},
    "objective.reference": lambda read: {"objective": ObjectiveConfig("ppo", reference=read)},
    "reward": lambda read: {"reward": ("stub", f"0.5:{read}")},
    "evaluate.samples": lambda read: {"evaluate": DuringConfig(samples=f"{read}/01.txt")},
    "evaluate.tasks-path": lambda read: {"evaluate": DuringConfig(tasks="piqa", tasks_path=read)},
    "data.template": lambda read: {
        "data": DataConfig(path=(read,), rows="chats", template=f"{read}/01.txt")
    },
    "ppo.pretraining-path": lambda read: {
        "ppo": PPOConfig(pretraining_coef=1.0, pretraining_path=(read,))
    },
}


@pytest.mark.parametrize("option", READ)
def test_what_a_run_reads_is_not_overwritten(option, material, tmp_path):
    """Through a link, too."""
    out = tmp_path / "out"
    shutil.copytree(material.docs, out / "hf")
    (tmp_path / "link").symlink_to(out / "hf")

    def requested(read: Path) -> RunConfig:
        run = replace(RunConfig(), **READ[option](str(read)))
        return replace(run, data=replace(run.data, path=(str(material.docs),)))

    def opened(paths: Sequence[str], validation: str | None = None) -> Inputs:
        held = None if validation is None else resolve_sources([validation])[0]
        return Inputs(resolve_sources(paths), held, None, 0)

    def read(run: RunConfig) -> list[DataSource]:
        text = opened(run.ppo.pretraining_path) if run.ppo.pretraining_path else None
        return Data(opened(run.data.path, run.data.validation), text).sources

    other, run = requested(material.docs), requested(tmp_path / "link")
    check_overwrite(other, tmp_path / "other", None, read(other))
    with pytest.raises(ValueError, match=f"--overwrite would delete {out}/hf"):
        check_overwrite(run, out, None, read(run))


def test_what_a_model_folder_leads_to_is_not_overwritten(material, tmp_path):
    """The files to which a folder's links lead, and the base model of adapters."""
    out = tmp_path / "out"
    shutil.copytree(material.docs, out / "hf")
    for name in ("links", "adapters"):
        (tmp_path / name).mkdir()
    (tmp_path / "links" / "model.safetensors").symlink_to(next((out / "hf").iterdir()))
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 8}
    config = json.dumps({**fields, "base_model_name_or_path": str(out / "hf")})
    (tmp_path / "adapters" / "adapter_config.json").write_text(config)
    for name in ("links", "adapters"):
        run = replace(RunConfig(), init=str(tmp_path / name))
        check_overwrite(run, tmp_path / "other", None, [])
        with pytest.raises(ValueError, match=f"--overwrite would delete {out}/hf"):
            check_overwrite(run, out, None, [])


def test_half_precision_inside_float64_is_refused(material):
    words = {"optimizer": {"name": "muon", "muon": {"dtype": "bfloat16"}}}
    with pytest.raises(ValueError, match=r"too coarse .* --optimizer.muon.dtype float32"):
        tinyrun.check_run(material.config(**words, train={"dtype": "float64"}), None)
    tinyrun.check_run(material.config(**words, train={"dtype": "bfloat16"}), None)


def test_a_section_that_a_checkpoint_lacks_has_not_changed(material):
    """As --adapter is, of one from before there was any."""
    run = material.config(train={"seed": 1})
    then = to_dict(material.config())
    del then["adapter"]
    saved = SimpleNamespace(run=then, data={})
    assert changes_since(saved, run, SimpleNamespace(fingerprint=dict)) == ["train.seed: 0 -> 1"]


EXPERTS = {
    "model_type": "mixtral",
    "num_local_experts": 4,
    **tinyrun.MODEL,
}


def test_each_model_of_a_run_is_opened_once(material, tmp_path, monkeypatch):
    """Also that of --init, whose config.json says which options --model.* there are, and one that
    is read as another model or has two roles.
    """
    opened, open_transformers = [], hf.open_transformers

    def count_openings(folder, *rest):
        opened.append(folder)
        return open_transformers(folder, *rest)

    monkeypatch.setattr(hf, "open_transformers", count_openings)
    changes = {"init": material.model, "out": tmp_path / "out", "data": material.options()["data"]}
    for model in ({}, {"model.rope_theta": 5.0}):
        opened.clear()
        worker.prepare(build_request("pretrain", {**changes, **model}), 1)
        assert opened == [material.model]
    opened.clear()
    roles = {"name": "dpo", "reference": str(material.model)}
    resolved = resolve(material.config(init=str(material.model), objective=roles), 1)
    assert opened == [material.model] and resolved.reference is resolved.init


EIGHT = {"global_batch_size": 8}


def test_a_microbatch_that_no_option_gives_fits_the_layout(material, tmp_path):
    """A file's size that the options' layout or batch does not fit is chosen anew. A size that is
    given, and one that a file has for the layout that it names itself, stay, to be refused.
    """

    def size(file, **changes):
        return build_request(file, changes).config.train.microbatch_size

    file = tmp_path / "config.yaml"
    write_config(tmp_path, resolve_model(material.config(), 1))
    assert size(file) == size(file, layout={"tp": 2}) == size(file, train=EIGHT) == 4
    for changes in (
        {"layout": {"dp": 2}},
        {"layout": {"pp": 2}},
        {"train": {"global_batch_size": 3}},
    ):
        assert size(file, **changes) is None
    assert size(file, layout={"dp": 2}, train={"microbatch_size": 3}) == 3
    requested = parse_run("dryrun", [str(file), "--layout.dp", "2"])
    assert isinstance(requested, DryrunRequest) and requested.run.microbatch_size == 2
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump(to_dict(material.config(train={"microbatch_size": 3}))))
    assert size(wrong) == size(wrong, train={"steps": 1}) == 3
