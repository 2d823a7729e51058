"""`dolmen train ppo`: a reward grows, two models learn at every layout as on one process, and a run
that is killed anywhere goes on bitwise.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tinyrun
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file
from spawning import serving
from tinyrun import Material, dolmen, losses, rows, same, tensors
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from dolmen.checkpoint import folders
from dolmen.conversion.source import open_source
from dolmen.core.config import changed_options, to_dict
from dolmen.core.mesh import SINGLE
from dolmen.core.state import local_view
from dolmen.data import loader as data_loader
from dolmen.data.base_loader import Description
from dolmen.data.batch import Batch
from dolmen.model.layout import Layout
from dolmen.model.spec import ScalarHeadSpec
from dolmen.ops.loss import IGNORED
from dolmen.optim.config import OptimizerConfig
from dolmen.rl import iteration, rollout
from dolmen.rl.config import CriticConfig
from dolmen.rl.prompts import NoValidation, Prompt, PromptLoader, Prompts
from dolmen.training import batches, initialize, loop
from dolmen.training import run as run_module
from dolmen.training.checks.rollout import check_rollout
from dolmen.training.config import RunConfig
from dolmen.training.resolve import resolve
from dolmen.training.run import run_training

material, one_thread = tinyrun.material, tinyrun.one_thread
PROMPTS = [{"prompt": f"ab {word} "} for word in "abcdefgh"]
ASKED = {
    "data": {"rows": "prompts"},
    "objective": {"name": "ppo"},
    "reward": ["stub"],
    "rollout": {"num_generations": 2, "prompts": 8, "epochs": 2, "max_new_tokens": 6},
    "ppo": {"kl_target": 0.5, "kl_horizon": 50.0, "kl_coef": 0.1},
    "critic": {"lr": 2e-2},
    "optimizer": {"lr": 1e-2, "schedule": "constant", "weight_decay": 0.0, "warmup_steps": 0},
    "train": {"steps": 9, "sequence_length": 32, "global_batch_size": 8},
    "log": {"to": ["none"]},
}
"""Phases of four updates."""


@pytest.fixture(scope="module")
def prompts(material, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    return folder


def train(
    material: Material,
    prompts: Path,
    out: Path,
    layout: Layout | None = None,
    resumed: bool = False,
    **sections,
) -> None:
    """run_training at `layout` of the joined world, or in this process without a group."""
    layout = layout or Layout(dp=1)
    mesh = layout.mesh(torch.device("cpu")) if dist.is_initialized() else SINGLE
    said = {name: {**v, **sections.pop(name, {})} for name, v in ASKED.items() if name != "reward"}
    said["data"]["path"] = [str(prompts / "prompts.jsonl")]
    said = {**said, "reward": ASKED["reward"], **sections}
    run = material.config(layout=vars(layout), **said)
    run_training(run, out, mesh, Console(quiet=True), resumed=resumed)


EACH = {"every": 1, "keep": 0}


def text_of(material: Material) -> dict:
    return {"pretraining_coef": 2.0, "pretraining_path": [str(material.docs)]}


def mean(found: list[dict], name: str) -> float:
    return sum(row[name] for row in found) / len(found)


LEARNING = {
    "rollout": {"num_generations": 4, "epochs": 1, "prompts": 8},
    "train": {"steps": 24, "global_batch_size": 32},
    "optimizer": {"lr": 2e-2},
}


@pytest.mark.slow
def test_a_reward_grows(material, prompts, tmp_path):
    """And, where nothing holds it, the KL, which is told though no reward has it in it."""
    train(material, prompts, tmp_path / "run", ppo={"kl_target": None, "kl_coef": 1e-6}, **LEARNING)
    found = rows(tmp_path / "run")
    assert mean(found[-3:], "rollout/reward") > 2 * mean(found[:3], "rollout/reward")
    assert max(row["rollout/logprob_difference_over_tolerance"] for row in found) < 1
    assert found[0]["rollout/kl_per_completion"] == 0 and found[0]["critic/lr"] == 2e-2
    assert mean(found[-3:], "rollout/kl_per_completion") > 1


@pytest.mark.slow
def test_a_kl_is_held_at_its_target(material, prompts, tmp_path):
    train(material, prompts, tmp_path / "run", **LEARNING)
    found = rows(tmp_path / "run")
    assert 0.25 < mean(found[-6:], "rollout/kl_per_completion") < 1
    assert found[-1]["rollout/kl_coef"] != found[0]["rollout/kl_coef"] == 0.1


@pytest.fixture(scope="module")
def whole(material, prompts, tmp_path_factory):
    """Nine steps, with a checkpoint after each."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(material, prompts, out, checkpoint={"every": 1, "keep": 0})
    return out


def killed(whole: Path, out: Path, step: int, drew: bool) -> None:
    """What a kill leaves after the checkpoint of `step`: before the next phase was drawn, or
    after.
    """
    shutil.copytree(whole, out)
    for other, folder in folders.list_checkpoints(out / "checkpoints").items():
        if other > step:
            shutil.rmtree(folder)
    for file in (out / "rollouts").glob("0*"):  # not completions.jsonl, of all iterations
        begins = int(file.name.partition(".")[0])
        if begins > step or begins == step and not drew:
            file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    "step, drew",
    [
        (4, False),
        (4, True),
        pytest.param(2, True, marks=pytest.mark.full),
        pytest.param(7, True, marks=pytest.mark.full),
    ],
)
def test_killed_anywhere_it_goes_on_bitwise(whole, material, prompts, tmp_path, step, drew):
    """Both models, both optimizers, what is drawn next, and the coefficient of the KL."""
    out = tmp_path / "run"
    killed(whole, out, step, drew)
    train(material, prompts, out, resumed=True, checkpoint={"every": 1, "keep": 0})
    got = tensors(out, 9)
    assert {name.split("/")[0] for name in got} >= {"critic.model", "critic.exp_avg"}
    assert same(tensors(whole, 9), got)
    names = "loss critic/loss rollout/reward rollout/kl_coef rollout/explained_variance".split()
    for number in (step + 1, 9):
        metrics, again = (
            [row for row in rows(one) if row["step"] == number][-1] for one in (whole, out)
        )
        assert {name: metrics[name] for name in names} == {name: again[name] for name in names}
    assert metrics["rollout/kl_coef"] not in (0.1, rows(whole)[0]["rollout/kl_coef"])


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local_view(one).untyped_storage().nbytes() for one in tensors)


@pytest.mark.slow
def test_models_wait_elsewhere(whole, material, prompts, tmp_path, monkeypatch):
    """Of what does not draw nothing is held while answers are drawn, and of the reference and the
    drawing model nothing while others learn; a run is the same to the bit.
    """
    out, seen, answered = tmp_path / "run", [], iteration.generate_completions

    def drawing(model, *more):
        state = seen[0]
        for one in (state, state.critic.state):
            assert bytes_of(one.tensors().values()) == 0
        assert bytes_of(model.parameters()) > 0
        seen.append(model)
        return answered(model, *more)

    class Watched(batches.PPORolloutBatches):
        def starting_at(self, *more):
            for now, batch in super().starting_at(*more):
                assert bytes_of(self.models.reference.parameters()) == 0
                assert bytes_of(self.models.generator.model.parameters()) == 0
                yield now, batch

    def state_of(*more):
        seen.append(made(*more))
        return seen[0]

    made = run_module.make_state
    monkeypatch.setattr(run_module, "make_state", state_of)
    monkeypatch.setattr(iteration, "generate_completions", drawing)
    monkeypatch.setattr(batches, "PPORolloutBatches", Watched)
    train(material, prompts, out, rollout={"offload": "cpu"}, checkpoint=EACH)
    assert len(seen) == 1 + 3 and same(tensors(whole, 9), tensors(out, 9))
    # two models of fp32 and two moments of each, and the reference
    size = 4 * sum(p.numel() for p in seen[0].model.parameters())
    assert rows(out)[0]["rollout/offloaded_gib"] * 2**30 == pytest.approx(7 * size, rel=0.2)


@pytest.mark.slow
def test_a_critic_is_exported(whole, material, tmp_path):
    """transformers has the values that the run itself has seen when a phase began; the folder is
    the start of another critic, and judges as a reward model.
    """
    step = whole / "checkpoints" / "step-00000008"
    out = tmp_path / "critic"
    assert dolmen("export", step, "--to", out, "--critic").code == 0
    seen = load_file(whole / "rollouts" / "00000008.safetensors")
    theirs = AutoModelForTokenClassification.from_pretrained(
        out, num_labels=1, dtype=torch.float32
    ).eval()
    assert not theirs.score.bias.any()  # of what dolmen does not have
    with torch.no_grad():
        found = theirs(seen["tokens"]).logits[..., 0]
    here = seen["labels"] != IGNORED
    assert seen["values"][here].abs().max() > 0.1
    torch.testing.assert_close(found[here], seen["values"][here], rtol=1e-5, atol=1e-5)
    last = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        score = last(seen["tokens"][:1, :6]).logits
    torch.testing.assert_close(score[0, 0], found[0, 5], rtol=1e-5, atol=1e-5)
    assert isinstance(open_source(out).spec.head, ScalarHeadSpec)
    none = dolmen("export", material.model, "--to", tmp_path / "no", "--critic")
    assert none.code == 2 and "is not a dolmen run" in none.words
    assert not (tmp_path / "no").exists()


def at_the_end_of(answers: int) -> None:
    """Die when a phase of that number has been drawn, and nothing of it is kept."""
    left, answered = [answers], iteration.generate_completions

    def dying(*more):
        found = answered(*more)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    iteration.generate_completions = dying


def between_two_updates(step: int) -> None:
    """Die when the critic has learned and the model has not."""
    made = loop.optimizer_step

    def dying(state, *more):
        if state.step == step and state.critic is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return made(state, *more)

    loop.optimizer_step = dying


def in_the_save_of(step: int) -> None:
    """Die before what was written is named as a whole checkpoint."""

    def dying(event, args):
        if event == "os.rename" and str(args[1]).endswith(f"step-{step:08d}"):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(dying)


MOMENTS = {
    "drawing": (at_the_end_of, 2),
    "learning": (between_two_updates, 6),
    "saving": (in_the_save_of, 7),
}


def until_killed(moment: str, material: Material, prompts: Path, out: Path) -> None:
    torch.set_num_threads(1)
    arrange, number = MOMENTS[moment]
    arrange(number)
    train(material, prompts, out, checkpoint=EACH)


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    ["learning", *(pytest.param(m, marks=pytest.mark.full) for m in MOMENTS if m != "learning")],
)
def test_kill_9_and_it_goes_on_bitwise(whole, material, prompts, tmp_path, moment):
    """benchmarks/chaos.py --ppo does so at random moments of several ranks."""
    out = tmp_path / "run"
    process = serving().Process(target=until_killed, args=(moment, material, prompts, out))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert max(folders.list_checkpoints(out / "checkpoints")) < 9
    train(material, prompts, out, resumed=True, checkpoint=EACH)
    assert same(tensors(whole, 9), tensors(out, 9))
    assert losses(out) == losses(whole)


@pytest.mark.slow
def test_what_a_critic_began_with_may_be_gone(material, prompts, tmp_path):
    """Its weights are in the checkpoint."""
    began, out = tmp_path / "began", tmp_path / "run"
    shutil.copytree(material.model, began)
    words = ("train", "ppo", "--init", material.model, "--critic.init", began, "--out", out)
    small = ("--train.sequence-length", 32, "--rollout.max-new-tokens", 4, "--log.to", "none")
    first = dolmen(
        *(*words, *small, "--data.path", prompts / "prompts.jsonl", "--reward", "stub"),
        *("--train.device", "cpu", "--train.global-batch-size", 4, "--train.steps", 1),
    )
    assert first.code == 0, first.err
    shutil.rmtree(began)
    more = dolmen("train", out / "config.yaml", "--out", out, "--resume", "--train.steps", 2)
    assert more.code == 0, more.err
    assert rows(out)[-1]["step"] == 2
    anew = dolmen("train", out / "config.yaml", "--out", tmp_path / "anew")
    assert anew.code == 2 and str(began) in anew.words


SPARSE = {
    **{name: value for name, value in tinyrun.CONFIG.items() if name != "model_type"},
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@pytest.mark.slow
def test_experts_are_replayed(material, prompts, tmp_path):
    """A phase's first update is as without, and the others are not; it goes on bitwise."""
    plain, out, more = tmp_path / "plain", tmp_path / "run", tmp_path / "more"
    said = {"model": SPARSE, "train": {"steps": 4}, "checkpoint": EACH}
    train(material, prompts, plain, **said)
    train(material, prompts, out, rollout={"routing_replay": True}, **said)
    seen = load_file(out / "rollouts" / "00000000.safetensors")["experts"]
    assert seen.shape[2] == 2 * 2 and len(seen.unique()) == 8
    without, found = rows(plain), rows(out)
    assert without[0]["loss"] == found[0]["loss"] and without[3]["loss"] != found[3]["loss"]
    assert without[0]["grad_norm"] == found[0]["grad_norm"]
    killed(out, more, 2, drew=True)
    train(material, prompts, more, resumed=True, rollout={"routing_replay": True}, **said)
    assert same(tensors(out, 4), tensors(more, 4))


def test_what_is_replayed_is_balanced_by_no_bias(material):
    """Which no update of a phase would follow."""

    def requested(**router) -> RunConfig:
        said = {**ASKED, "model": SPARSE, "ppo": {}, "train": {"router": router}}
        return material.config(**{**said, "rollout": {"routing_replay": True}})

    check_rollout(resolve(requested(), None))
    check_rollout(resolve(requested(balance="bias", bias_rate=0.0), None))
    with pytest.raises(ValueError, match="bias-rate 0.01. would adjust .*bias-rate 0"):
        check_rollout(resolve(requested(balance="bias", bias_rate=0.01), None))


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_run_without_a_reward_is_told_of_it_alone(material, name):
    with pytest.raises(ValueError, match=f"^{name} needs --reward: exact, gsm8k, .*MODULE:FUNC"):
        check_rollout(
            resolve(material.config(**{**ASKED, "objective": {"name": name}, "reward": []}), None)
        )


@pytest.mark.slow
def test_a_critic_may_learn_alone_at_first(material, prompts, tmp_path):
    train(
        material,
        prompts,
        tmp_path / "run",
        critic={"warmup_steps": 2},
        train={"steps": 4},
        checkpoint={"every": 2},
    )
    started, then = tensors(tmp_path / "run", 2), tensors(tmp_path / "run", 4)

    def learned(at: dict[str, torch.Tensor], kind: str) -> bool:
        return any(tensor.any() for name, tensor in at.items() if name.startswith(f"{kind}/"))

    assert learned(started, "critic.exp_avg") and not learned(started, "exp_avg")
    assert learned(then, "exp_avg")
    assert all("skipped_steps" not in row for row in rows(tmp_path / "run"))


@pytest.fixture(scope="module")
def mixed(material, prompts, tmp_path_factory):
    """Six steps with text beside, with a checkpoint after each."""
    out = tmp_path_factory.mktemp("mixed") / "run"
    train(material, prompts, out, ppo=text_of(material), train={"steps": 6}, checkpoint=EACH)
    return out


@pytest.mark.slow
def test_text_beside_is_learned(mixed, whole, material, prompts, tmp_path):
    """It becomes likelier than in a run without, and another batch of it is read in each step."""
    found = rows(mixed)
    reported = [row["objective/pretraining_loss"] for row in found]
    assert reported[-1] < reported[0] - 0.5 and len(set(reported)) == 6
    # before anything is learned the policy's loss is the same
    alone = rows(whole)[0]["loss"]
    assert found[0]["loss"] == pytest.approx(alone + 2 * reported[0], rel=1e-6)


def test_each_rank_reads_its_own_text(material):
    """Of the rank's place in dp."""
    calls = []

    def batch(*place):
        calls.append(place)
        return Batch(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))

    text = SimpleNamespace(description=Description(""), identity={}, batch=batch)
    loader = PromptLoader(
        Prompts("p", [], 1, 0), NoValidation(), 8, None, Description(""), {}
    ).add_pretraining(text)
    run = material.config(ppo={**text_of(material)}, objective={"name": "ppo"})
    found = initialize.make_pretraining(
        run, loader, SimpleNamespace(dp=SimpleNamespace(rank=1, size=2))
    )
    found.batch(3)
    assert calls == [(3, 1, 2)] and found.coefficient == 2.0


def test_prompts_and_text_of_one_name_are_told_apart():
    """How often each has been read."""
    prompts = Prompts("docs", [Prompt([1], {}, "1")] * 4, 2, 0)
    loader = PromptLoader(prompts, NoValidation(), 8, None, Description(""), {})  # pyright: ignore
    text = SimpleNamespace(
        description=Description(""), identity={}, epochs=lambda step: {"docs": 0.5 * step}
    )
    assert loader.add_pretraining(text).epochs(3) == {"docs": 3.0, "pretraining docs": 1.5}  # pyright: ignore


def changes_of(what: str) -> list[str]:
    """What a run is told that goes on with another one."""
    sections = {"critic": CriticConfig(lr=1e-3), "optimizer": OptimizerConfig(lr=1.0)}
    if what in sections:
        changed = replace(RunConfig(), **{what: sections[what]})
        return changed_options(to_dict(RunConfig()), to_dict(changed))
    if what == "log":
        return changed_options({"log": {"every": 1}}, {"log": {"every": 2}})

    def loader(content: str) -> PromptLoader:
        identity = {"tokenizer": content if what == "tokenizer" else "", "data 1": ""}
        text = SimpleNamespace(
            description=Description(""), identity={"data 1": content if what == "text" else ""}
        )
        made = PromptLoader(
            Prompts("p", [], 1, 0), NoValidation(), 8, None, Description(""), identity
        )  # pyright: ignore
        return made.add_pretraining(text)  # pyright: ignore

    return data_loader.changes(loader("old").fingerprint(), loader("new").fingerprint())


@pytest.mark.parametrize("what", ["critic", "optimizer", "text", "tokenizer", "log"])
def test_what_others_would_have_drawn_is_forgotten(what, tmp_path):
    """From the step on that is gone on from, and where it follows from what has changed."""
    for step in (0, 4, 8):
        rollout.save(rollout.make_rollout([[1]], [[2]], [[-0.5]], 8, 2), tmp_path, step, [])
    changed = changes_of(what)
    assert len(changed) == 1
    batches.forget_other(tmp_path, 4, changed)
    left = {int(file.stem) for file in (tmp_path / "rollouts").iterdir()}
    assert left == ({0, 4, 8} if what == "log" else {0})


@pytest.mark.slow
def test_text_goes_on_where_it_was(mixed, material, prompts, tmp_path):
    out = tmp_path / "run"
    killed(mixed, out, 3, drew=True)
    train(
        *(material, prompts, out),
        resumed=True,
        ppo=text_of(material),
        train={"steps": 6},
        checkpoint=EACH,
    )
    assert same(tensors(mixed, 6), tensors(out, 6))
    assert (
        rows(mixed)[-1]["objective/pretraining_loss"] == rows(out)[-1]["objective/pretraining_loss"]
    )


LAYOUTS = (
    Layout(dp=2, zero=3),
    Layout(tp=2, dp=1, sequence_parallel=True),
    Layout(pp=2, dp=1),
    Layout(cp=2, dp=1),
)


def two_ranks(folder: Path, material: Material, prompts: Path) -> None:
    for i, layout in enumerate(LAYOUTS):
        idle = "cpu" if i < 2 else "none"
        run = folder / f"at{i}"
        train(material, prompts, run, layout, train={"steps": 5}, rollout={"offload": idle})


@pytest.mark.spawn
@pytest.mark.slow
def test_two_models_learn_at_every_layout_as_on_one_process(
    material, prompts, whole, spawn, tmp_path
):
    """Draws follow from their own numbers, so a layout changes roundings alone; where models wait
    changes nothing.
    """
    spawn(2)(two_ranks, tmp_path, material, prompts)
    for i, layout in enumerate(LAYOUTS):
        got = rows(tmp_path / f"at{i}")
        for one, want in zip(got, rows(whole)[:5], strict=True):
            for name in ("rollout/reward", "rollout/completion_length"):
                assert one[name] == want[name], (layout, one["step"], name)
            for name in ("grad_norm", "critic/loss", "critic/grad_norm", "rollout/kl_coef"):
                assert one[name] == pytest.approx(want[name], rel=1e-4), (layout, name)


@pytest.mark.spawn
@pytest.mark.slow
def test_what_no_run_of_ppo_can_be_is_refused(material, prompts, tmp_path):
    def requested(*more):
        return dolmen(
            *("train", "ppo", "--init", material.model, "--out", tmp_path / "no"),
            *("--train.device", "cpu", "--data.path", prompts / "prompts.jsonl"),
            *("--train.sequence-length", 32, "--rollout.max-new-tokens", 8),
            *("--reward", "stub", *more),
        )

    for name, changed in (("other", {"vocab_size": 310}), ("wider", {"intermediate_size": 64})):
        model = LlamaForCausalLM(LlamaConfig(**{**tinyrun.MODEL, **changed}))
        model.save_pretrained(tmp_path / name)
    for words, why in (
        (("--ppo.pretraining-coef", 2), "ppo.pretraining-path (none): give both"),
        (
            ("--ppo.pretraining-coef", 2, "--ppo.pretraining-path", tmp_path / "gone"),
            "gone: no such file or folder",
        ),
        (("--rollout.routing-replay",), "rollout.routing-replay is for MoE"),
        (("--rollout.beta", 0.1), "rollout.beta is 0.1, which is for grpo"),
        (("--critic.warmup-steps", 4, "--train.steps", 4), "covers all of the run's 4 steps"),
        (("--ppo.kl-target", 1, "--ppo.kl-horizon", 1), "ppo.kl-horizon (1) is too short"),
        (("--critic.init", tmp_path / "other"), "vocab_size of 310, but the model has 300"),
        (("--critic.init", tmp_path / "wider"), "another shape than the model (intermediate_size"),
    ):
        found = requested(*words)
        assert found.code == 2 and why in found.words, found.words
    assert not (tmp_path / "no").exists()
