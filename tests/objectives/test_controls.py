"""The controls of `make rlhf-controls` in short: a policy that draws tokens learns by GRPO, or by
PPO with a critic that expects nothing, to draw some of them more often, within a bound of its KL;
with each fault of benchmarks/rlhf/faults.py that fails.

Its text is fixed and what is drawn is not read again, so the KL is known: a sum over places.
"""

import json
from pathlib import Path

import pytest
import torch
from table import FAMILIES
from tiny_models import build, initialize

from benchmarks.rlhf import controls, faults
from benchmarks.rlhf.faults import FAULTS, UNHELD, put_in
from dolmen.core.mesh import SINGLE
from dolmen.data.batch import Batch
from dolmen.model import head
from dolmen.model.layout import Layout
from dolmen.objectives import advantage
from dolmen.objectives.on_policy import ADVANTAGE, OLD, REFERENCE, GRPOLoss, PPOPolicyLoss

ROWS, PLACES, VOCAB = 32, 6, FAMILIES["llama"].vocab_size
WANTED = torch.zeros(PLACES, VOCAB)  # at even places an eighth of all tokens, at odd ones another
WANTED[::2, : VOCAB // 8] = WANTED[1::2, VOCAB // 8 : VOCAB // 4] = 1
TIMES, BOUND, STEPS, BETA, KL_COEF = 2.5, 10.0, 30, 0.3, 0.07


def advantages(recipe: str, scores, old, reference, held: bool) -> torch.Tensor:
    """Of each token of each row."""
    if recipe == "grpo":
        groups = torch.arange(ROWS) // 8
        return advantage.normalize_by_group(scores, groups)[:, None].expand(ROWS, PLACES)
    here = torch.ones(ROWS, PLACES)
    coef = KL_COEF if held else 1e-6
    rewards = advantage.token_rewards(
        scores, old, reference, here, kl="k1", kl_coef=coef, clip=None
    )
    found, _ = advantage.gae(rewards, torch.zeros_like(here), here, gamma=1.0, lam=1.0)
    return advantage.whiten(found, here)


def learned(recipe: str, name: str, seed: int) -> tuple[float, float]:
    """How much more often it draws what is wanted, and its KL from the start in nats per row."""
    model, start = (build(FAMILIES["llama"], SINGLE, Layout(), None) for _ in range(2))
    initialize(model, seed)
    initialize(start, seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    tokens = torch.arange(1, PLACES + 1).expand(ROWS, PLACES).contiguous()
    held = name != "no KL"
    objective = GRPOLoss(beta=BETA if held else 1e-6) if recipe == "grpo" else PPOPolicyLoss()
    with put_in(name):
        for _ in range(STEPS):
            with torch.no_grad():
                chances = model(tokens, head.compute_logits).softmax(-1)
                labels = torch.multinomial(chances.flatten(0, 1), 1, generator=generator).view(
                    ROWS, PLACES
                )
                requested = Batch(tokens, labels)
                old, reference = (
                    one(tokens, lambda h, end, b=requested: end.log_probabilities(h, b.labels))
                    for one in (model, start)
                )
                scores = WANTED[torch.arange(PLACES), labels].mean(1)
                found = advantages(recipe, scores, old, reference, held)
            batch = Batch(
                tokens, labels, numbers={OLD: old, ADVANTAGE: found, REFERENCE: reference}
            )
            scored = model(tokens, lambda h, end, b=batch: objective(h, end, b))
            optimizer.zero_grad()
            (scored.total / objective.count(batch)).backward()
            optimizer.step()
    with torch.no_grad():
        after, before = (
            one(tokens[:1], head.compute_logits)[0].log_softmax(-1) for one in (model, start)
        )
    kl = float((after.exp() * (after - before)).sum())
    share = [float((one.exp() * WANTED).sum(-1).mean()) for one in (after, before)]
    return share[0] / share[1], kl


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.full) for s in (1, 2))])
@pytest.mark.parametrize(
    "recipe, name",
    [
        # a shift or a shuffle is the same for both: of PPO with --full
        pytest.param(r, name, marks=[pytest.mark.full] * (r == "ppo" and name in FAULTS[1:3]))
        for r in UNHELD
        for name in FAULTS
    ],
)
def test_a_reward_grows_within_its_bound_but_for_a_fault(recipe, name, seed):
    times, kl = learned(recipe, name, seed)
    assert (times > TIMES and kl < BOUND) == (name == "sound"), (times, kl)
    if name == "no KL":
        assert times > TIMES and kl > BOUND


def ran(folder: Path, reward: float) -> None:
    """What a run of twenty phases leaves, whose reward begins with a tenth."""
    folder.mkdir(parents=True)
    reported = [{"step": n, "rollout/reward": 0.1 if n < 3 else reward} for n in range(20)]
    lines = (json.dumps({**one, "rollout/kl_per_completion": 1.0}) for one in reported)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "summary.json").write_text("{}")


def test_those_runs_are_judged_that_were_asked_for(tmp_path, monkeypatch, capsys):
    """Others may not have been run, or be wrong."""
    monkeypatch.setattr(faults, "FOLDER", tmp_path)
    requested = [("ppo", "sound", 0), ("ppo", "flipped", 0)]
    for one, reward in zip(requested, (0.9, 0.2), strict=True):
        ran(faults.folder(*one), reward)
    assert controls.told(requested) and controls.told(requested[1:])
    said = capsys.readouterr().out
    assert "ppo sound        9.0 times at 1.0 nats: 1 of 1 pass, 1 asked for" in said
    assert not controls.told([*requested, ("ppo", "flipped", 1)])  # has not been run
    ran(faults.folder("ppo", "shuffled", 0), 0.9)
    assert controls.told(requested) and not controls.told([("ppo", "shuffled", 0)])
