"""docs/reference/metrics.md has every metric that a run can log, and no other."""

import ast
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
from tinyrun import documented_metrics

from dolmen.objectives import pairs
from dolmen.objectives.objective import CrossEntropy, MaskedLM
from dolmen.objectives.on_policy import GRPOLoss, PPOPolicyLoss, PPOValueLoss
from dolmen.objectives.preference import DPO, KTO, ReferenceFreePreference
from dolmen.objectives.reward import PairwiseRewardLoss
from dolmen.rl import environment, iteration, rewards, rollout
from dolmen.training import balance, evaluate, hooks, mfu, step

OBJECTIVES = (
    CrossEntropy(),
    MaskedLM(follows=1.0),
    PairwiseRewardLoss(),
    DPO(),
    ReferenceFreePreference("simpo", 2.0),
    KTO(),
    GRPOLoss(beta=1.0, entropy_coef=0.1),
    PPOPolicyLoss(dual_clip=3.0, entropy_coef=0.1),
)
"""With all of their metrics; those of a critic are apart."""
ON_PAIRS = (PairwiseRewardLoss(), DPO(), KTO())
"""Objectives whose own metrics a validation has."""


def keys_of(*sources: Callable | ModuleType) -> set[str]:
    """Keys of the mappings that functions make, * for what is filled in."""
    found: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(dedent(inspect.getsource(source)))):
            match node:
                case ast.Dict(keys=keys):
                    found |= {*_texts(keys)}
                case ast.DictComp(key=key):
                    found |= {*_texts([key])}
                case ast.Assign(targets=[ast.Subscript(slice=key)]):
                    found |= {*_texts([key])}
    return found


def _texts(nodes: Iterable[ast.AST | None]) -> Iterable[str]:
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.JoinedStr(values=parts):
                yield "".join(str(p.value) if isinstance(p, ast.Constant) else "*" for p in parts)


def all_metrics() -> set[str]:
    """Every name that a row of metrics.jsonl can have, by what makes the rows."""
    names = {name for one in OBJECTIVES for name in (*one.names, step.PRETRAINING)}
    found = {name if "/" in name else f"objective/{name}" for name in names}
    found |= keys_of(
        hooks.TrainingHooks.log, hooks.TrainingHooks.validate, hooks.TrainingHooks.evaluate
    )
    found |= keys_of(mfu.Peak.utilization, evaluate.Validator.measure)
    found |= keys_of(evaluate.RunEvaluator.scores, evaluate.SourceValidation.row) | {*balance.NAMES}
    made = keys_of(environment.MultiTurn, iteration, rewards.CombinedReward, rollout)
    found |= {name for name in made if name.startswith("rollout/")}
    found -= {"calibration_error", "val_*", "critic/*"}
    found |= {f"val_{name}" for one in ON_PAIRS for name in one.names} | {"val_calibration_error"}
    critic = keys_of(hooks.critic_row) - {"critic/*"}
    return found | {f"critic/{name}" for name in (*critic, *balance.NAMES, *PPOValueLoss().names)}


def test_every_metric_is_in_the_glossary_and_no_other():
    known, made = documented_metrics(), all_metrics()
    assert made - known == set(), "not in docs/reference/metrics.md"
    assert known - made == set(), "nothing logs them"


def test_names_of_preferences_are_those_of_trl():
    names = {*pairs.REWARDS, *pairs.LOGPS}
    assert {"rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"} <= names
    assert {"rewards/accuracies", "rewards/margins"} <= names == {*DPO().names}


@pytest.mark.parametrize(
    "off, on, name",
    [
        (GRPOLoss(), GRPOLoss(beta=0.1), "reference_kl"),
        (PPOPolicyLoss(), PPOPolicyLoss(dual_clip=3.0), "dual_clip_fraction"),
        (MaskedLM(), MaskedLM(follows=1.0), "follows"),
    ],
)
def test_what_is_off_has_no_metric(off, on, name):
    assert name not in off.names and name in on.names


def test_each_row_has_a_unit_or_none_and_a_meaning():
    page = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()
    rows = re.findall(r"^\| (`.*)\|$", page, re.M)
    assert len(rows) > 40 and all(len(row.split("|")) == 3 for row in rows)
    assert all(row.rstrip().endswith(".") for row in rows)
