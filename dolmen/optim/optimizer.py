"""Optimizers per parameter role, and the precision of master weights.

Arithmetic of a step: masters of fp32 or wider; fp16 needs its loss scaled so that small
gradients do not vanish (1710.03740).

What updates the parameters: by --optimizer.name each role has a rule (`RULES`), and each rule
kinds of state (`KINDS`), which lie where the parameter lies.

AdamW (1711.05101) has no decay on norms and biases. `fused`: 33M parameters as DTensors took 245 ms
per step with foreach and 14.5 ms fused. Its one kernel per hundred parameters is given this rank's
shards: 300 parameters take 1 ms of host time, and 6 where DTensor finds out for each what an update
of it means.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dolmen.core import state
from dolmen.core.mesh import Mesh
from dolmen.core.torch_private import compute
from dolmen.model.decoder import Decoder
from dolmen.model.spec.param import ParamSpec, ParamSpecs, Role
from dolmen.optim import muon
from dolmen.optim.config import Name, OptimizerConfig

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def master_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of master weights and optimizer state for compute in `dtype`: fp32, or fp64
    for float64.
    """
    return torch.promote_types(DTYPES[dtype], torch.float32)


@dataclass
class LossScale:
    """A dynamic loss scale: halved (not below 1) when a gradient overflows, doubled after
    `patience` steps without. Constant 1 unless `dynamic`.
    """

    dynamic: bool
    value: float = 1.0
    good_steps: int = 0
    patience: int = 2000

    @staticmethod
    def from_dtype(dtype: str) -> "LossScale":
        """Return a dynamic scale that starts at 2^16 for float16, else the constant 1."""
        return LossScale(True, 2.0**16) if dtype == "float16" else LossScale(False)

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step, whose gradients had no overflow if `finite`: double it
        after `patience` such steps in a row, halve it (to 1 at least) after any other. Does nothing
        unless dynamic.
        """
        if not self.dynamic:
            return
        if not finite:
            self.value, self.good_steps = max(1.0, self.value / 2), 0
        # 2,000 steps is the interval of 1710.03740's implementations (Apex, torch.amp)
        elif self.good_steps + 1 == self.patience:
            self.value, self.good_steps = self.value * 2, 0
        else:
            self.good_steps += 1


Rule = Literal["adamw", "muon"]
RULES: dict[Name, dict[Role, Rule]] = {
    "adamw": dict.fromkeys(get_args(Role), "adamw"),
    "muon": {**dict.fromkeys(get_args(Role), "adamw"), "matrix": "muon", "expert": "muon"},
}
"""A router is AdamW's: its rows are classes, as those of a head are."""

MODEL = "model/"  # what the names of parameters begin with, beside those of their moments
KINDS: dict[Rule, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": muon.KINDS}
"""Kinds of state tensors that each rule keeps per parameter."""


class AdamW(compute.ViewAdamW):
    """AdamW whose parameters and state rest as DTensors, while a step computes with this rank's
    plain shards.
    """

    view = staticmethod(state.local)


class CombinedOptimizer:
    """Several optimizers as one: stepped, scheduled and saved together."""

    def __init__(self, *rules: torch.optim.Optimizer):
        """Combine the optimizers `rules`; they share one table of state afterwards."""
        self.rules = rules
        self.param_groups = [group for rule in rules for group in rule.param_groups]
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for rule in rules:
            self.state.update(rule.state)
            # what `prime` and `load` write here is what each optimizer's step reads
            rule.state = self.state  # one table

    def step(self) -> None:
        """Make one step of each optimizer."""
        for rule in self.rules:
            rule.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters: to None, or to zeros."""
        for rule in self.rules:
            rule.zero_grad(set_to_none)


Optimizer = AdamW | CombinedOptimizer


def make_optimizer(model: Decoder, config: OptimizerConfig, mesh: Mesh) -> Optimizer:
    """Build the optimizer that `config` names over this rank's trainable parameters: AdamW, without
    its state (`prime` allocates it), or Muon for matrices and experts with AdamW for the rest, with
    state.
    """
    if config.name == "adamw":
        return adamw(model, config)
    exact = model.split.kernels.exact is not None
    rules = RULES[config.name]
    by: dict[Rule, dict[str, nn.Parameter]] = {"adamw": {}, "muon": {}}
    params = model.local_specs()
    for name, p in _trainable(model).items():
        # the rule follows the parameter's role, never its name or shape
        by[rules[params[name].role]][name] = p
    optimizers: list[torch.optim.Optimizer] = []
    if by["muon"]:
        optimizers.append(muon.Muon(by["muon"].values(), config, mesh, exact))
    # a stage without trainable parameters still gets an (empty) AdamW
    if by["adamw"] or not optimizers:
        optimizers.append(_adamw(by["adamw"], params, config, fused=not exact))
    together = CombinedOptimizer(*optimizers)
    prime(together)
    return together


def adamw(model: Decoder, config: OptimizerConfig) -> AdamW:
    """Build AdamW over all parameters of the model that require a gradient, without allocating its
    state; norms and biases have no weight decay.
    """
    # the fused kernel gives other bits to the last elements of a shard
    fused = model.split.kernels.exact is None
    return _adamw(_trainable(model), model.local_specs(), config, fused)


def _trainable(model: Decoder) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _adamw(
    trained: Mapping[str, nn.Parameter],
    params: Mapping[str, ParamSpec],
    config: OptimizerConfig,
    fused: bool = True,
) -> AdamW:
    """Build AdamW over the parameters `trained` in two groups: those that decay, as their specs in
    `params` say, and those that do not (norms, biases). `fused`: update by torch's one kernel, else
    by lists of operators.
    """
    groups = [
        {
            "params": [p for name, p in trained.items() if params[name].decays],
            "weight_decay": config.weight_decay,
            "kinds": KINDS["adamw"],
        },
        {
            "params": [p for name, p in trained.items() if not params[name].decays],
            "weight_decay": 0.0,
            "kinds": KINDS["adamw"],
        },
    ]
    return AdamW(
        [g for g in groups if g["params"]] or groups[:1],  # a stage may have nothing to train
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
        foreach=not fused,
    )


def prime(optimizer: Optimizer) -> None:
    """Allocate the optimizer's state (zeros), where a parameter has none yet, before the first
    step, so that a checkpoint has tensors to be read into.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state[p]:
                optimizer.state[p] = {
                    # fused AdamW needs its step count on the parameter's device
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    **{kind: torch.zeros_like(p) for kind in group["kinds"]},
                }


def tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return every tensor that a checkpoint keeps, by name: `model/NAME`, `exp_avg/NAME`,
    `momentum/NAME`, each in its parameter's shape and sharding. Call `prime` first.

    Raises KeyError if a trained parameter has no state: the model then shows gathered copies, not
    its shards. The step count is not here: it is one number, kept as JSON and put back by
    `set_step`.
    """
    kinds = {p: group["kinds"] for group in optimizer.param_groups for p in group["params"]}
    out: dict[str, Tensor] = {f"{MODEL}{n}": p for n, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if p.requires_grad:
            for kind in kinds[p]:
                out[f"{kind}/{name}"] = optimizer.state[p][kind]
    return out


def load(
    model: nn.Module,
    optimizer: Optimizer,
    kind: str,
    stream: Callable[[Collection[str]], Iterable[tuple[str, Tensor]]],
) -> None:
    """Fill one `kind` of optimizer state (such as exp_avg) of the trained parameters from
    `stream(parameter names)`, which yields (name, unsharded tensor); each rank keeps its shard.
    Call `prime` first. Raises KeyError for a parameter that the stream leaves out.
    """
    states = optimizer.state
    expected = {
        name: states[p][kind]
        for name, p in model.named_parameters()
        if p.requires_grad and kind in states[p]
    }
    for name, value in stream(list(expected)):
        # each rank keeps its shard of the unsharded tensor
        state.write_region(expected.pop(name), value)
    if expected:
        raise KeyError(f"no {kind} of {len(expected)} parameters, e.g. {sorted(expected)[:3]}")


def names(params: ParamSpecs, name: Name) -> set[str]:
    """Return the names of all tensors that a checkpoint of the whole model keeps, over all pipeline
    stages: `model/NAME` of each parameter, and each kind of state of the trained ones, for the
    optimizer called `name`.
    """
    trained = {
        f"{kind}/{n}"
        for n, param in params.items()
        if param.trained
        for kind in KINDS[RULES[name][param.role]]
    }
    return trained | {f"{MODEL}{n}" for n in params}


def set_step(optimizer: Optimizer, step: int) -> None:
    """Set the number of updates made in every parameter's state; AdamW's bias correction needs
    it.
    """
    for s in optimizer.state.values():
        s["step"].fill_(float(step))
