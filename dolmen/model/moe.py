"""The sparse feed-forward layer: a router sends each token to k of E experts, gated MLPs of width
F.

    x [n, H]             I@tp or S(0)@tp
      | enter
      | router             fp32, on every rank of tp
      | n k rows by expert
      | dispatch           over ep, to the rank that holds the expert
      | experts            F split over tp
      | combine            over ep, and back
      | weigh, add         P@tp
      v leave

Experts lie on their own axes: E over ep, F over tp, and what remains of dp x cp, edp, shards them
as ZeRO says. Router weights are replicated and see a partial sum, so their gradient is Partial on
tp. No layout changes what is computed: rows are never dropped, and the balance loss is that of
single sequences, whose counts are summed over cp.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dolmen.core import collectives, ranges
from dolmen.core.state import Replicate, Shard, local
from dolmen.model.config import ModelConfig
from dolmen.model.given import Balance, Given
from dolmen.model.layers import Leaf
from dolmen.model.split import Split
from dolmen.ops import moe
from dolmen.ops.activation import ACTIVATIONS
from dolmen.parallel import expert
from dolmen.parallel.tensor import TensorParallel


class Router(Leaf):
    """Logits of every expert, in fp32 whatever the model computes in, and the choice: x [n, H] R@tp
    -> [n, E], Routing. `bias`, where there is one, is moved by train/balance.py and not by
    gradients.
    """

    placements = {"weight": Replicate(), "bias": Replicate()}

    def __init__(self, c: ModelConfig, tp: TensorParallel):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        self.bias = (
            nn.Parameter(torch.empty(c.num_experts), requires_grad=False)
            if c.router_balance == "bias"
            else None
        )
        self.gradients = {"weight": tp.branch_grad}
        self.k, self.normalize = c.num_experts_per_tok, c.norm_topk_prob

    def forward(self, x: Tensor) -> tuple[Tensor, moe.Routing]:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        logits = F.linear(x.to(wide), local(self.weight).to(wide))
        return logits, moe.route(
            logits, self.k, self.normalize, None if self.bias is None else local(self.bias)
        )


class Stacked(Leaf):
    """One matrix of every expert: [E, out, in], E split over ep, `dim` over tp."""

    def __init__(self, experts: int, out: int, inp: int, dim: int, std_scale: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out, inp))
        self.placements, self.std_scale = {"weight": (Shard(0), Shard(dim))}, std_scale


class Experts(nn.Module):
    """rows [m, H] in `groups` of this rank's experts, R@tp -> [m, H] P@tp."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.act = ACTIVATIONS[c.activation]
        self.gate = Stacked(c.num_experts, c.expert_size, c.hidden_size, 1)
        self.up = Stacked(c.num_experts, c.expert_size, c.hidden_size, 1)
        self.down = Stacked(
            c.num_experts, c.hidden_size, c.expert_size, 2, 1 / math.sqrt(2 * c.num_hidden_layers)
        )

    @ranges.marked("experts")
    def forward(self, rows: Tensor, groups: moe.Groups) -> Tensor:
        gate, up = (moe.grouped_linear(rows, local(w.weight), groups) for w in (self.gate, self.up))
        return moe.grouped_linear(self.act(gate) * up, local(self.down.weight), groups)


class MoE(nn.Module):
    """x [batch * length / cp, H] I@tp (or S(0)@tp) -> the same."""

    def __init__(self, c: ModelConfig, split: Split):
        super().__init__()
        tp, ep = split.tp, split.ep
        if c.expert_size % tp.axis.size:
            raise ValueError(
                f"moe_intermediate_size ({c.expert_size}) is not divisible by tp ({tp.axis.size}): "
                f"set --layout.tp to a divisor"
            )
        if c.num_experts % ep.size:
            raise ValueError(
                f"num_experts ({c.num_experts}) is not divisible by ep ({ep.size}): set "
                f"--layout.ep to a divisor"
            )
        self.tp = tp
        self.cp = split.cp
        self.ep = ep
        self.number = c.num_experts
        self.k = c.num_experts_per_tok
        self.balance = c.router_aux_loss_coef if c.router_balance == "loss" else 0.0
        self.z = c.router_z_loss_coef
        self.kernel = split.kernels.grouped == "grouped_mm"
        self.router, self.experts = Router(c, tp), Experts(c)

    @property
    def static(self) -> bool:
        """Whether no shape depends on where tokens go, and nothing is read."""
        return self.kernel and self.ep.size == 1

    def forward(self, x: Tensor, given: Given) -> Tensor:
        x = self.tp.enter(x)
        logits, routing = self.router(x)
        weights = routing.weights
        if given.balance is not None and torch.is_grad_enabled():
            weights = self._account(logits, routing, given.batch, given.balance)
        order = moe.sort(routing.experts, self.number)
        rows, trip = expert.dispatch(moe.spread(x, order), order.counts, self.ep, self.kernel)
        rows = expert.combine(self.experts(rows, trip.groups), trip, self.ep)
        return self.tp.leave(moe.combine(rows, weights, order))

    def _account(
        self, logits: Tensor, routing: moe.Routing, batch: int, balance: Balance
    ) -> Tensor:
        """The routing weights, through which the auxiliary losses of `batch` sequences enter the
        gradient and the tally.

        Every rank of tp computes the same losses, and the gradients of x and of the router are
        summed over tp: each gives its part. Only counts need the whole sequence: under cp the
        losses are sums over this rank's tokens.
        """
        length = len(logits) // batch * self.cp.axis.size
        here = moe.sequence_counts(routing.experts, batch, self.number)
        uneven = moe.balance_loss(
            routing.probabilities, collectives.reduce_scalar(here, self.cp.axis), length, self.k
        )
        z = moe.z_loss(logits, length)
        loss = (self.balance * uneven + self.z * z) / self.tp.axis.size
        found = torch.cat([here.sum(0).double(), torch.stack((uneven, z)).detach().double()])
        return _Account.apply(routing.weights, loss, balance.scale, found, balance.tally)


class _Account(torch.autograd.Function):
    """The identity on `weights`. Backward sends `scale` into `loss` and `found` into the tally:
    once per microbatch, however often forward was run.
    """

    @staticmethod
    def forward(ctx, weights, loss, scale, found, tally):
        ctx.dtype = loss.dtype
        ctx.save_for_backward(scale, found)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, g):
        scale, found = ctx.saved_tensors
        return g, scale.to(ctx.dtype), None, None, found
