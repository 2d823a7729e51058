"""The oracle: a trainer of one process in float64, written from papers and definitions on the
modules of `transformers`. It shares no code with the house and imports nothing of it (a test says
so): where the two agree, both are right or both are wrong in the same way by chance.

    model       the `transformers` module of the family, everything that asks for fp32 given fp64
    masks       a query sees the keys before it, of its own document, within the window
    update      AdamW (Loshchilov and Hutter, 1711.05101, algorithm 2), gradients clipped by the
                norm of all of them (Pascanu et al., 1211.5063); Muon (Jordan et al., 2024; Liu et
                al., 2502.16982, equation 4)
    schedules   warm-up, then constant, cosine (1608.03983), linear, or WSD (2404.06395)
    experts     balance loss (Switch, 2101.03961, a sequence at a time), z-loss (ST-MoE,
                2202.08906), balance by a bias (2408.15664)
    policies    a step that is not finite, or a spike of the gradient, changes no parameter; the
                loss scale of Micikevicius et al. (1710.03740)

Names of parameters are those of a stored checkpoint of the family, experts each by itself.
"""

import contextlib
import io
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor
from wide import Wide, double

IGNORED = -100  # a label that carries no loss
STORED = {  # of one expert: the module's gate, up and down
    "mixtral": ("block_sparse_moe.experts.{}.w1", "experts.{}.w3", "experts.{}.w2"),
    **dict.fromkeys(
        ("qwen3_moe", "deepseek_v2", "deepseek_v3"),
        ("mlp.experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj"),
    ),
}


@dataclass(frozen=True)
class Batch:
    """tokens, labels, starts: int64 [sequences, length]. `starts`: index of the first token of each
    token's document; None: one document.
    """

    tokens: np.ndarray
    labels: np.ndarray
    starts: np.ndarray | None = None


@dataclass(frozen=True)
class Job:
    """What a run is, in the words of the papers."""

    kind: str
    model: dict[str, Any]  # fields of config.json
    steps: int = 5
    lr: float = 1e-2
    warmup_steps: int = 0
    schedule: str = "constant"
    min_lr: float = 0.0
    decay_fraction: float = 0.2
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-3
    clip: float = 0.25
    balance: str = "loss"  # loss | bias | none
    balance_coef: float = 0.0
    z_coef: float = 0.0
    bias_rate: float = 0.0
    spike_factor: float | None = None
    loss_scale: float | None = None  # where a dynamic one starts
    patience: int = 2000  # finite steps after which it doubles


@dataclass(frozen=True)
class MuonJob(Job):
    """A run whose hidden matrices are updated by Muon."""

    momentum: float = 0.95


@dataclass
class Result:
    """Per step what metrics tell; at the end what is at rest, by stored name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    max_load: list[float] = field(default_factory=list)
    balance: list[float] = field(default_factory=list)
    z: list[float] = field(default_factory=list)
    validation: tuple[float, int] = (math.nan, 0)  # nats a token, tokens
    weights: dict[str, Tensor] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    biases: list[Tensor] = field(default_factory=list)


def build(job: Job) -> torch.nn.Module:
    """The module of the family, float64, its values not yet set."""
    return double(transformers.AutoConfig.for_model(job.kind, **job.model))


def stored(model: torch.nn.Module, kind: str) -> dict[str, tuple[Tensor, Any]]:
    """Stored name -> (parameter or buffer, the part of it that is stored under the name)."""
    out, rest = {}, model.state_dict()
    buffers = ((name, b) for name, b in model.named_buffers() if name in rest)
    for name, p in [*model.named_parameters(), *buffers]:
        layer, _, expert = name.partition("mlp.experts.")
        if not expert:
            router = name.replace("mlp.gate.", "block_sparse_moe.gate.")
            out[router if kind == "mixtral" else name] = p, ...
            continue
        first = STORED[kind][0].partition("experts.")[0]
        gate, up, down = (
            f"{layer}{first}experts.{s.partition('experts.')[2]}" for s in STORED[kind]
        )
        for e in range(len(p)):
            if expert == "down_proj":
                out[f"{down.format(e)}.weight"] = p, e
            else:
                half = p.shape[1] // 2
                out[f"{gate.format(e)}.weight"] = p, (e, slice(half))
                out[f"{up.format(e)}.weight"] = p, (e, slice(half, None))
    return out


def initial(
    job: Job, special: dict[int, float] | None = None, equal: bool = False
) -> dict[str, Tensor]:
    """Initial weights, fp32, by a formula that no version of a library changes: numpy's frozen
    RandomState, seeded by the name. Norms lie about 1, biases about 0, a router is decided.
    `special`: rows of the embedding of these tokens are multiplied. `alike`: the experts' rows of a
    router differ by less than bf16 can tell.
    """
    out = {}
    for name, (p, part) in stored(build(job), job.kind).items():
        shape = p[part].shape
        noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape))
        if decays(name):
            value = noise * (0.6 if name.endswith("gate.weight") else 0.15)
            if equal and name.endswith("gate.weight"):
                value = 0.75 + noise * 2**-12
        else:
            value = noise * 0.1 + (not name.endswith("bias"))
        if "embed_tokens" in name:
            for token, factor in (special or {}).items():
                value[token] *= factor
        out[name] = torch.from_numpy(value.astype(np.float32))
    return out


def write(folder: Path, job: Job, weights: dict[str, Tensor]) -> None:
    """A `transformers` directory of them."""
    with contextlib.redirect_stderr(io.StringIO()):
        config = transformers.AutoConfig.for_model(job.kind, **job.model)
        config.architectures = [type(build(job)).__name__]
        config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def decays(name: str) -> bool:
    """Weight decay is for matrices: neither norms nor biases."""
    return not (name.endswith("bias") or "norm" in name or ".ln_" in name)


def is_hidden(name: str) -> bool:
    """Muon is for matrices inside layers: neither embedding and head nor routers."""
    outside = ("embed_tokens.weight", "lm_head.weight", ".gate.weight")
    return decays(name) and not name.endswith(outside)


def rate(job: Job, step: int) -> float:
    """Learning rate of update `step`, from 0. Warm-up rises in equal parts to the peak at its last
    step; what decays would reach the least at the step after the last.
    """
    if step < job.warmup_steps:
        return job.lr * (step + 1) / job.warmup_steps
    part = (step - job.warmup_steps) / (job.steps - job.warmup_steps)
    if job.schedule == "cosine":
        share = (1 + math.cos(math.pi * part)) / 2
    elif job.schedule == "linear":
        share = 1 - part
    elif job.schedule == "wsd":
        share = min(1.0, (job.steps - step) / (job.steps * job.decay_fraction))
    else:
        return job.lr
    return job.min_lr + (job.lr - job.min_lr) * share


def masks(job: Job, config: Any, batch: Batch) -> Any:
    """What each layer adds to the scores [sequences, 1, queries, keys]; None: `transformers` makes
    its own, of one document.
    """
    if batch.starts is None:
        return None
    length = batch.tokens.shape[1]
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    full = (key <= query) & (key >= batch.starts[:, :, None])
    window = getattr(config, "sliding_window", None)
    near = full if window is None else full & (query - key < window)
    add = {
        name: torch.from_numpy(np.where(seen, 0.0, -np.inf))[:, None]
        for name, seen in (("full_attention", full), ("sliding_attention", near))
    }
    return add if hasattr(config, "layer_types") else add["sliding_attention"]


class Routers:
    """The routers of a model: what each has decided, and the biases of their choice, where there
    are any: those of DeepSeek-V3 are its own, others are given one to be balanced by.
    """

    def __init__(self, model: torch.nn.Module, job: Job):
        self.job, self.seen = job, []
        self.modules = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]
        self.modules = [m for m in self.modules if hasattr(m, "top_k")]
        self.sigmoid = job.kind == "deepseek_v3"
        if self.sigmoid:
            self.biases = [m.e_score_correction_bias for m in self.modules]
        elif job.balance == "bias":
            self.biases = [torch.zeros(m.num_experts, dtype=torch.float64) for m in self.modules]
            for module, bias in zip(self.modules, self.biases, strict=True):
                module.forward = self._biased(module, bias)
        else:
            self.biases = []
        for module in self.modules:
            module.register_forward_hook(lambda m, given, out: self.seen.append((out[0], out[2])))

    def _biased(self, module: torch.nn.Module, bias: Tensor):
        """The bias joins the probabilities for the choice, not for the weights."""

        def forward(x):
            logits = F.linear(x.reshape(-1, x.shape[-1]), module.weight)
            p = logits.softmax(-1)
            chosen = (p.detach() + bias).topk(module.top_k, -1).indices
            weights = p.gather(1, chosen)
            if getattr(module, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, chosen

        return forward

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of all experts: the softmax, or the shares of the sum of sigmoids (2412.19437 eq. 18)."""
        if not self.sigmoid:
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)

    def losses(self, sequences: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Of each layer: balance and z loss, means over sequences, and tokens of each expert."""
        balance, z, loads = [], [], []
        for logits, chosen in self.seen:
            experts, k = logits.shape[1], chosen.shape[1]
            logits, chosen = logits.view(sequences, -1, experts), chosen.view(sequences, -1)
            length = logits.shape[1]
            counts = torch.stack([row.bincount(minlength=experts) for row in chosen])
            mean = self.probabilities(logits).mean(1)
            balance.append((counts * mean).sum(1).mul(experts / (k * length)).mean())
            z.append(logits.logsumexp(-1).square().mean(1).mean())
            loads.append(counts.sum(0).double())
        self.seen.clear()
        return balance, z, loads

    def move(self, loads: Sequence[Tensor]) -> None:
        """Up for an expert with less than the mean, down for one with more."""
        if self.job.balance == "bias":
            for bias, load in zip(self.biases, loads, strict=True):
                bias += self.job.bias_rate * torch.sign(load.mean() - load)


def forward(model: torch.nn.Module, job: Job, batch: Batch) -> tuple[Tensor, int]:
    """Sum of the cross-entropies of labels that are not IGNORED, and their number."""
    tokens, labels = torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
    with Wide():
        logits = model(
            input_ids=tokens, attention_mask=masks(job, model.config, batch), use_cache=False
        ).logits
    assert logits.dtype == torch.float64
    real = labels != IGNORED
    picked = logits.log_softmax(-1)[real].gather(1, labels[real][:, None])
    return -picked.sum(), int(real.sum())


class AdamW:
    """Algorithm 2 of Loshchilov and Hutter, its schedule multiplier in the rate."""

    def __init__(self, job: Job, parameters: dict[str, Tensor]):
        self.job, self.parameters, self.updates = job, parameters, 0
        self.first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def update(self, gradients: dict[str, Tensor], lr: float) -> None:
        self.updates += 1
        for name, p in self.parameters.items():
            self.move(name, p, gradients[name], lr)

    def move(self, name: str, p: Tensor, g: Tensor, lr: float) -> None:
        c, m, v = self.job, self.first[name], self.second[name]
        m.copy_(c.beta1 * m + (1 - c.beta1) * g)
        v.copy_(c.beta2 * v + (1 - c.beta2) * g * g)
        m_hat, v_hat = m / (1 - c.beta1**self.updates), v / (1 - c.beta2**self.updates)
        kept = 1 - lr * c.weight_decay if decays(name) else 1  # of inf too, and not inf - inf
        p.copy_(kept * p - lr * m_hat / (v_hat.sqrt() + c.eps))


class Muon(AdamW):
    """Jordan's, with Nesterov's momentum; decay and scale are those of Liu et al. What a hidden
    matrix has of moments is its momentum.
    """

    def __init__(self, job: MuonJob, parameters: dict[str, Tensor]):
        super().__init__(job, parameters)
        self.momentum = job.momentum
        self.second |= {name: m for name, m in self.first.items() if is_hidden(name)}

    def move(self, name: str, p: Tensor, g: Tensor, lr: float) -> None:
        if not is_hidden(name):
            return super().move(name, p, g, lr)
        m = self.first[name]
        m.copy_(self.momentum * m + g)
        scale = 0.2 * math.sqrt(max(p.shape))
        moved = scale * orthogonal(g + self.momentum * m)
        p.copy_(p - lr * (moved + self.job.weight_decay * p))


def orthogonal(g: Tensor) -> Tensor:
    """Five steps of Newton-Schulz, of the fifth order."""
    x = g / (g.norm() + 1e-7)
    if g.shape[0] > g.shape[1]:
        return orthogonal(g.T).T
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


def optimizer_of(job: Job, parameters: dict[str, Tensor]) -> AdamW:
    return Muon(job, parameters) if isinstance(job, MuonJob) else AdamW(job, parameters)


def train(
    job: Job, weights: dict[str, Tensor], batches: Sequence[Batch], validation: Sequence[Batch] = ()
) -> Result:
    """`job.steps` updates on `batches`, the whole batch at once, then the validation loss."""
    model = build(job)
    names = stored(model, job.kind)
    with torch.no_grad():
        for name, (p, part) in names.items():
            p[part] = weights[name].double()
    names = {name: place for name, place in names.items() if place[0].requires_grad}
    parts = {name: p.data[part] for name, (p, part) in names.items()}  # views
    optimizer, routers, out = optimizer_of(job, parts), Routers(model, job), Result()
    usual, scale, good = [], job.loss_scale, 0
    for step, batch in enumerate(batches[: job.steps]):
        loss, norm, gradients, count, loads = _gradients(model, job, batch, names, routers, out)
        finite = math.isfinite(loss) and math.isfinite(norm)
        spike = finite and _spikes(job, norm, usual)
        lr = rate(job, step)
        if finite and not spike:
            # 1e-6: torch.nn.utils.clip_grad_norm_ has it, and so is no norm divided by zero
            shrink = min(1.0, job.clip / (norm + 1e-6)) if job.clip else 1.0
            optimizer.update({name: g * shrink for name, g in gradients.items()}, lr)
            routers.move(loads)
        if scale is not None:
            good = good + 1 if finite else 0
            scale = scale / 2 if not finite else scale
            if good == job.patience:
                scale, good = scale * 2, 0
            out.scales.append(scale)
        out.losses.append(loss)
        out.norms.append(norm)
        out.rates.append(lr)
        out.tokens.append(count + (out.tokens[-1] if out.tokens else 0))
        out.skipped.append(int(spike or not finite))
    out.validation = evaluate(model, job, validation)
    out.weights, out.first, out.second = parts, optimizer.first, optimizer.second
    out.biases = routers.biases
    return out


def _gradients(model, job: Job, batch: Batch, names, routers: Routers, out: Result):
    """Mean loss, norm of the whole gradient, gradients by stored name, tokens, loads of experts."""
    model.zero_grad()
    nats, count = forward(model, job, batch)
    balance, z, loads = routers.losses(len(batch.tokens))
    coef = job.balance_coef if job.balance == "loss" else 0.0
    total = nats / count + sum(coef * b + job.z_coef * s for b, s in zip(balance, z, strict=True))
    total.backward()
    gradients = {name: p.grad[part] for name, (p, part) in names.items()}
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    if loads:
        out.max_load.append(max(float(load.max() / load.mean()) for load in loads))
        out.balance.append(float(sum(balance).detach() / len(balance)))
        out.z.append(float(sum(z).detach() / len(z)))
    return float(nats.detach()) / count, norm, gradients, count, loads


def _spikes(job: Job, norm: float, usual: list[float]) -> bool:
    """Whether `norm` is over `spike_factor` times the median of the last 64, of which there must be
    16; it joins them.
    """
    last = usual[-64:]
    usual.append(norm)
    return (
        job.spike_factor is not None and len(last) >= 16 and norm > job.spike_factor * median(last)
    )


def evaluate(model: torch.nn.Module, job: Job, batches: Sequence[Batch]) -> tuple[float, int]:
    """Mean cross-entropy in nats a token over all of `batches`, and the tokens."""
    nats, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            loss, tokens = forward(model, job, batch)
            nats, count = nats + float(loss), count + tokens
    return (nats / count if count else math.nan), count
