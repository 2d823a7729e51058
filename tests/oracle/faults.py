"""Ways to be wrong in every layout alike, one line each: what a comparison of dolmen with itself
cannot see, and the named row of the oracle's table does.
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from adapter import ignored

from dolmen.core.state import local
from dolmen.data import mixture
from dolmen.model import block, component, head, layers, mlp
from dolmen.model.spec import LatentAttentionSpec
from dolmen.ops import moe as routing
from dolmen.ops import rope
from dolmen.ops.attention import blockwise, score_bias
from dolmen.ops.elementwise import ACTIVATIONS
from dolmen.optim import optimizer
from dolmen.parallel import data
from dolmen.training import balance, step
from dolmen.training.state import SpikePolicy


@dataclass(frozen=True)
class Fault:
    """`wrong` takes what is right at `place.name` and gives what is there instead."""

    what: str
    row: str
    place: object
    name: str
    wrong: Callable

    def __str__(self) -> str:
        return self.what

    @contextmanager
    def made(self):
        with ExitStack() as stack:
            if isinstance(self.place, dict):
                wrong = {self.name: self.wrong(self.place[self.name])}
                stack.enter_context(mock.patch.dict(self.place, wrong))
            else:
                wrong = self.wrong(getattr(self.place, self.name))
                stack.enter_context(mock.patch.object(self.place, self.name, wrong))
            yield


def by_hand(inside_root: bool = False, corrected: bool = True, rounded: bool = False):
    """AdamW with one thing wrong."""

    def update(made):
        for group in made.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                s = made.state[p]
                s["step"] += 1
                count, m, v, g = s["step"].item(), s["exp_avg"], s["exp_avg_sq"], p.grad
                m.lerp_(g, 1 - beta1)
                v.mul_(beta2).add_(g * g, alpha=1 - beta2)
                one, two = (1 - b**count if corrected else 1.0 for b in (beta1, beta2))
                eps = group["eps"]
                root = (v / two + eps).sqrt() if inside_root else (v / two).sqrt() + eps
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * m / one / root)
                if rounded:
                    p.copy_(p.to(torch.bfloat16))

    def wrong(right):
        def adamw(model, config):
            made = right(model, config)
            made.step = torch.no_grad()(lambda: update(made))
            return made

        return adamw

    return wrong


def narrow(router, x, chosen=None):
    """A router that computes in bf16."""
    logits = (x.bfloat16() @ local(router.weight).bfloat16().t()).float()
    return logits, routing.route(logits, router.k, router.choice.normalise)


def decay_of_all(right):
    def adamw(model, config):
        made = right(model, config)
        for group in made.param_groups:
            group["weight_decay"] = config.weight_decay
        return made

    return adamw


def no_decay_of_the_embedding(right):
    def adamw(model, config):
        made = right(model, config)
        first, second = made.param_groups
        first["params"].remove(model.embed.weight)
        second["params"].append(model.embed.weight)
        return made

    return adamw


def by_value(right):
    def clip(parameters, factor):
        for p in parameters:
            p.grad.clamp_(-0.25, 0.25)

    return clip


def mean_of_means(right):
    """Each microbatch's loss is the mean of its own tokens."""
    count = int((~ignored(8)).sum())

    def loss(x, weight, labels, *rest):
        return right(x, weight, labels, *rest) * count / (4 * (labels >= 0).sum().clamp(min=1))

    return loss


def argument(index: int, change: Callable):
    """The argument of that index is another."""

    def wrong(right):
        def called(*args, **options):
            args = list(args)
            args[index] = change(args[index])
            return right(*args, **options)

        return called

    return wrong


def auxiliary(factor: float):
    """The gradient of auxiliary losses is another multiple of them."""
    return argument(1, lambda loss: loss * factor)


def keyword(**wrong):
    """Named arguments are others."""
    return lambda right: lambda *args, **options: right(*args, **options | wrong)


def unrounded(right):
    """Slopes and their products with positions as they are."""
    return lambda heads, positions: (
        torch.tensor(score_bias.alibi_slopes(heads), dtype=torch.float64) * positions[..., None]
    )


def one_after_the_other(right):
    """What attention makes enters the feed-forward layer."""

    def compute(block, x, inputs, cache=None):
        for part, options in ((block.attn, (inputs, cache)), (block.mlp, (inputs,))):
            (entered,) = component.enter([part], block.norm(x))
            x = x + component.leave([part], [part.inner(entered, *options)])
        return x

    return compute


def norms_exchanged(right):
    """Each of two layers side by side has the norm of the other."""
    return lambda block, x: [
        *component.enter([block.attn], block.mlp_norm(x)),
        *component.enter([block.mlp], block.attn_norm(x)),
    ]


FAULTS = [
    Fault("eps inside the root", "llama", optimizer, "adamw", by_hand(inside_root=True)),
    Fault("moments not corrected", "llama", optimizer, "adamw", by_hand(corrected=False)),
    Fault("masters of bf16", "bfloat16-masters", optimizer, "adamw", by_hand(rounded=True)),
    Fault("a router in bf16", "bfloat16-router", mlp.Router, "forward", lambda right: narrow),
    Fault("decay of norms and biases", "strong-decay", optimizer, "adamw", decay_of_all),
    Fault(
        "no decay of the embedding",
        "strong-decay-qwen3",
        optimizer,
        "adamw",
        no_decay_of_the_embedding,
    ),
    Fault("clipped by value", "llama", data, "scale_gradients", by_value),
    Fault("schedule a step early", "cosine", step, "learning_rate", argument(1, lambda s: s + 1)),
    Fault("warm-up from 0", "warmup", step, "learning_rate", argument(1, lambda s: s - 1)),
    Fault("document masks ignored", "masked", blockwise, "attention",
          argument(3, lambda attend: attend._replace(documents=None))),
    Fault("window one longer", "mistral", blockwise, "attention",
          argument(3, lambda attend: attend._replace(window=attend.window + 1))),
    Fault("a loss of each microbatch", "uneven-accumulation", head, "linear_cross_entropy",
          mean_of_means),
    Fault("auxiliary losses of each microbatch", "auxiliary-accumulation",
          mlp._RouterLossGradient, "apply",
          auxiliary(4.0)),
    Fault("auxiliary losses not scaled", "loss-scale-moe", mlp._RouterLossGradient, "apply",
          auxiliary(2.0**-20)),
    Fault("loss scale not undone", "loss-scale-moe", data, "scale_gradients",
          argument(1, lambda factor: factor * 2**20)),
    Fault("another theta", "llama", rope, "inverse_frequencies", argument(1, lambda t: 1.001 * t)),
    Fault("llama3's factor left out", "llama3", rope, "llama3",
          argument(1, lambda factor: 1.0)),
    Fault("weights of experts normalised", "qwen3-moe", routing, "route",
          argument(2, lambda normalize: not normalize)),
    Fault("the exact gelu", "gpt2", ACTIVATIONS, "gelu_tanh",
          lambda right: torch.nn.functional.gelu),
    Fault("biases moved the other way", "bias-balance", balance, "_move",
          argument(2, lambda rate: -rate)),
    Fault("biases moved in a skipped step", "not-finite-bias-balance", balance,
          "update_router_bias",
          lambda right: lambda model, tallies, update: right(model, tallies, True)),
    Fault("Adam's count taken from the step", "resumed-not-finite", optimizer, "set_step",
          argument(1, lambda updates: updates + 2)),
    Fault("spikes forgotten by a checkpoint", "resumed-spike", SpikePolicy, "load",
          lambda right: lambda self, norms: None),
    Fault("data of another seed", "seed-1", mixture, "seed_of", argument(0, lambda seed: 0)),
    Fault("one after the other", "falcon-7b", block.ParallelBlock, "compute", one_after_the_other),
    Fault("norms of the other side", "falcon-40b", block.ParallelBlock, "enter_branches",
          norms_exchanged),
    Fault("slopes of the last head first", "bloom", score_bias, "alibi_slopes",
          lambda right: lambda heads: right(heads)[::-1]),
    Fault("steps of ALiBi not rounded", "falcon-rw", score_bias, "alibi_key_bias", unrounded),
    Fault("norms of their weights alone", "gemma2", layers, "rms_norm",
          argument(4, lambda zero_centred: False)),
    Fault("scores not capped", "gemma2", blockwise, "attention",
          argument(3, lambda attend: attend._replace(soft_cap=None))),
    Fault("scores without YaRN's temperature", "deepseek-v2", LatentAttentionSpec, "scale",
          lambda right: property(lambda mixer: mixer.head_size**-0.5)),
    Fault("experts of any group", "deepseek-v2", routing, "route",
          keyword(groups=1, groups_per_token=1)),
    Fault("weights of experts not scaled", "deepseek-v2", routing, "route", keyword(scale=1.0)),
    Fault("groups by their best expert", "deepseek-v3", routing, "route",
          keyword(group_score="max")),
    Fault("pairs of rope half a head apart", "deepseek-v3", rope, "rotate",
          argument(3, lambda interleaved: False)),
    Fault("shares of experts by softmax", "auxiliary-deepseek-v3", routing, "route",
          lambda right: lambda logits, *rest, **options: right(
              logits, *rest, **options)._replace(probabilities=logits.softmax(-1))),
]  # fmt: skip
