"""Feed-forward layers: dense, gated down(act(gate x) * up x) or plain down(act(up x)), and mixture
of experts (MoE).

MoE: a router sends each token to k of E experts, gated MLPs of width F.

    x [n, H]             I@tp or S(0)@tp
      | enter
      | router             fp32, on every rank of tp
      | n k rows by expert
      | dispatch           all-to-all over ep, to the rank that holds the expert
      | experts            grouped products, F split over tp
      | combine            all-to-all over ep, back
      | weighted sum       P@tp, with the shared expert, a dense mlp, added
      v leave              one sum for both

Experts have their own axes: E is sharded over ep, F over tp, and what remains of dp x cp, edp,
shards them as ZeRO requires. Router weights are replicated over tp and see a partial sum, so their
gradient is partial over tp.

Invariants. No layout changes the result: there is no capacity factor, rows are never dropped, and
the balance loss is per sequence, its counts summed over cp. Logits and choice are fp32 or wider: in
bf16 equal scores are frequent, and a choice would depend on the layout's order of sums.

The auxiliary losses have no place in forward's result, as a pipeline stage only returns x. They
enter the gradient through the routing weights (`_RouterLossGradient`), whose backward adds the loss
gradient and counts the chosen experts in a tally: once per microbatch, however often recomputation
runs forward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from dolmen.core import collectives, profiling
from dolmen.core.autograd import Context, TypedFunction
from dolmen.core.state import local
from dolmen.model import spec
from dolmen.model.component import (
    Branch,
    Component,
    LayerCache,
    LayerInputs,
    ModuleContext,
    RouterLosses,
)
from dolmen.model.layers import ColumnParallelLinear, ParameterModule, RowParallelLinear, fuse
from dolmen.model.spec import ParamSpecs, select_prefix
from dolmen.model.spec.layers import Activation
from dolmen.ops import invariant, moe
from dolmen.ops.elementwise import ACTIVATIONS, clamped_swiglu
from dolmen.parallel import expert, tensor
from dolmen.parallel.data import Unit
from dolmen.parallel.exact import round_losses
from dolmen.parallel.tensor import Linear, TensorParallel


class MLP(Branch):
    """Dense feed-forward layer: x [tokens, hidden] I@tp (or S(0)@tp) -> the same; down(act(gate x)
    * up x), or down(act(up x)) without a gate.
    """

    def __init__(self, mlp: spec.MLPSpec, params: ParamSpecs, setting: ModuleContext):
        """Build gate (if the spec is gated), up and down projections; `params`: their parameters,
        by names without the layer's prefix.
        """
        super().__init__()
        self.tp = setting.split.tp
        self.act = _activations(self.tp)[mlp.activation]
        self.gate = ColumnParallelLinear(select_prefix(params, "gate")) if mlp.gated else None
        self.up = ColumnParallelLinear(select_prefix(params, "up"))
        if self.gate is not None:
            fuse(self.gate, self.up)
        self.down = RowParallelLinear(select_prefix(params, "down"), self.tp)

    @property
    def columns(self) -> list[Linear]:
        """Column-parallel weights that multiply x: gate (if there is one) and up."""
        # separate parameters, multiplied in one call: entered once
        ins = [self.up] if self.gate is None else [self.gate, self.up]
        return [module.linear() for module in ins]

    @property
    def row(self) -> RowParallelLinear:
        """Down projection, which is row-parallel."""
        return self.down

    def inner(
        self,
        products: Sequence[Float[Tensor, "tokens _"]],
        inputs: LayerInputs,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "tokens _"]:
        """Return act(gate) * up, or act(up), from the products of x: [tokens, width / tp]."""
        first, *rest = products
        hidden = self.act(first)
        return hidden * rest[0] if rest else hidden


def _activations(tp: TensorParallel) -> Mapping[str, Callable[[Tensor], Tensor]]:
    """Return the activations by name, with exact numerics those whose bits no layout changes."""
    return ACTIVATIONS if tp.exact is None else invariant.ACTIVATIONS


class Router(ParameterModule):
    """Router of an MoE layer: x [n, hidden] R@tp -> logits of every expert [n, experts], in fp32 or
    wider, and the Routing (chosen experts and weights). Its balance `bias` affects the choice
    alone, and is moved by training/balance.py, not by gradients.
    """

    def __init__(self, experts: spec.MoESpec, params: ParamSpecs, tp: TensorParallel):
        """Register the weight and biases of `params`, and keep how the spec chooses experts."""
        super().__init__({n: param for n, param in params.items() if "." not in n})
        self.k, self.choice, self.tp = experts.per_token, experts.router, tp
        # GPT-OSS learns a bias of the logits; `bias` acts on the choice alone
        logits_params = select_prefix(params, "logits")
        self.logits = ParameterModule(logits_params) if logits_params else None

    def forward(
        self, x: Float[Tensor, "n hidden"], chosen: Int64[Tensor, "n k"] | None = None
    ) -> tuple[Float[Tensor, "n experts"], moe.Routing]:
        """Return the fp32 logits of every expert, and the routing: k experts of each token of x,
        and their weights. `chosen` [n, k] forces the experts (routing replay); weights are computed
        from the logits in either case.
        """
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        # fp32: in bf16, 8 bits of mantissa, two of 256 logits are often equal, and top-k is
        # arbitrary
        x, weight, bias = x.to(wide), local(self.weight).to(wide), None
        if self.logits is not None and self.logits.bias is not None:
            bias = local(self.logits.bias).to(wide)
        if self.tp.exact is None:
            logits = F.linear(x, weight)
            logits = logits if bias is None else logits + bias
        else:
            (logits,) = tensor.products(x, [Linear(weight, bias)], self.tp)
        # added to the scores for top-k, and not to the weights
        choice, bias = self.choice, None if self.bias is None else local(self.bias)
        return logits, moe.route(
            logits,
            self.k,
            choice.normalise,
            bias,
            score=choice.score,
            scale=choice.scale,
            groups=choice.groups,
            groups_per_token=choice.groups_per_token,
            group_score=choice.group_score,
            experts=chosen,
            exact=self.tp.exact is not None,
        )


class Experts(nn.Module):
    """This rank's experts: rows [m, hidden] sorted into `groups` by expert, R@tp -> [m, hidden]
    P@tp. Weights are stacked, [experts, out, in], and biases [experts, out].
    """

    def __init__(self, experts: spec.MoESpec, params: ParamSpecs, setting: ModuleContext):
        """Register the stacked weights of this rank's experts (a contiguous range of them over ep,
        their width split over tp).
        """
        super().__init__()
        split = setting.split
        self.ep, self.name = split.ep, f"layers.{setting.layer}.mlp.experts"
        self.gated = _gated_activation(experts.activation, split.tp)
        self.share = float(split.tp.axis.rank == 0)  # of tp, where the bias of `down` joins the sum
        # each has rows of all tokens of its ep, and so of no one's tokens in particular
        # number of this rank's first expert: each ep rank has an equal, contiguous range
        first = experts.number // split.ep.size * split.ep.rank
        self.tp = replace(split.tp, tokens=(split.edp,), first_expert=first)
        self.gate = ParameterModule(select_prefix(params, "gate"))
        self.up = ParameterModule(select_prefix(params, "up"))
        self.down = ParameterModule(select_prefix(params, "down"))

    @profiling.record_function_range("experts")
    def forward(
        self, rows: Float[Tensor, "m hidden"], groups: moe.Groups, leaves: expert.Leaves = ()
    ) -> Float[Tensor, "m hidden"]:
        """Return the experts' outputs for `rows`, sorted by expert into `groups`: [m, hidden], a
        partial sum over tp; with exact numerics, where groups have `leaves`, the sum.
        """
        if self.tp.exact is not None:
            ins = [self._exact_linear(name) for name in ("gate", "up")]
            gate, up = expert.leaf_linears(rows, ins, leaves, self.tp)
            hidden, down = self.gated(gate, up), self._exact_linear("down")
            return expert.leaf_linears(hidden, [down], leaves, self.tp)[0]
        # [m, expert width / tp]
        gate, up = (
            self._grouped_linear(rows, projection.linear(), groups)
            for projection in (self.gate, self.up)
        )
        down = self.down.linear()
        if down.bias is not None:  # every rank of tp adds it, all but one nothing
            down = down._replace(bias=down.bias * self.share)
        return self._grouped_linear(self.gated(gate, up), down, groups)

    def _exact_linear(self, name: str) -> Linear:
        """Return weight and bias of the projection `name`; with several ranks of ep and gradients
        copies of them, one for the rows of each rank, whose gradients are added apart: microbatches
        of a rank come together before ranks do.
        """
        linear = getattr(self, name).linear()
        if self.ep.size == 1 or not torch.is_grad_enabled():
            return linear
        weight, bias = (
            None
            if p is None
            else self.tp.copy_weight(f"{self.name}.{name}.{kind}", p, self.ep.size)
            for kind, p in (("weight", linear.weight), ("bias", linear.bias))
        )
        return linear._replace(weight=weight, bias=bias)

    def _grouped_linear(self, rows: Tensor, linear: Linear, groups: moe.Groups) -> Tensor:
        """Multiply each row by its expert's weight (rounded to fp8 or int8 if the weight is), then
        add the LoRA adapter, apply DoRA's gain, and add the bias.
        """
        product, adapter = self.tp.product(linear), linear.adapter
        if product is None:
            # plain product: one grouped GEMM, or a loop over experts
            y = moe.grouped_linear(rows, linear.weight, groups)
        else:
            assert not isinstance(groups, Tensor), "kernels.choose has chosen a loop"
            # fp8 or int8: expert by expert, counts on the host
            y = expert.rounded_linear(rows, linear.weight, groups, product)
        if adapter is not None:
            # y += scale B (A x), each row with its own expert's A and B
            h = moe.grouped_linear(rows, adapter.down, groups)
            y = y.add_(moe.grouped_linear(h * adapter.scale, adapter.up, groups))
            # DoRA: y * m / |W + scale B A|, a factor per expert and output
            gain = adapter.gain(linear.dequantised_weight(rows.dtype), self.tp.axis)
            if gain is not None:
                y = y * moe.grouped_bias(torch.zeros_like(y), gain.to(y.dtype), groups)
        return y if linear.bias is None else moe.grouped_bias(y, linear.bias, groups)


def _gated_activation(
    activation: Activation | spec.ClampedSwiGLU, tp: TensorParallel
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function (gate, up) -> hidden of an expert: act(gate) * up, or GPT-OSS's clamped
    SwiGLU.
    """
    match activation:
        case spec.ClampedSwiGLU(alpha, limit):
            sigmoid = torch.sigmoid if tp.exact is None else invariant.sigmoid
            return partial(clamped_swiglu, alpha=alpha, limit=limit, sigmoid=sigmoid)
        case _:
            act = _activations(tp)[activation]
            return lambda gate, up: act(gate) * up


class MoE(Component):
    """Mixture-of-experts layer, with a shared expert if the spec has one: x [batch * length / cp,
    hidden] I@tp (or S(0)@tp) -> the same.
    """

    def __init__(self, experts: spec.MoESpec, params: ParamSpecs, setting: ModuleContext):
        """Build router, this rank's experts and the shared expert; `params`: their parameters, by
        names without the layer's prefix.
        """
        super().__init__()
        split, training = setting.split, setting.training.router
        self.tp = split.tp
        self.cp = split.cp
        self.ep = split.ep
        self.number = experts.number
        self.k = experts.per_token
        stated, override = experts.router.aux_loss_coef, training.aux_loss_coef
        # the run's coefficient over that of config.json
        coef = stated if override is None else override
        self.balance = coef if training.balance == "loss" else 0.0
        self.z = training.z_loss_coef
        # counts stay on the device; a loop needs them on the host
        self.kernel = split.kernels.grouped == "grouped_mm"
        self.router = Router(experts, select_prefix(params, "router"), split.tp)
        self.experts = Experts(experts, select_prefix(params, "experts"), setting)
        # computed by every token; entered and left together with the experts, so it costs no
        # collective
        shared = experts.shared
        self.shared = (
            None if shared is None else MLP(shared, select_prefix(params, "shared"), setting)
        )
        self.shared_gate = (
            ParameterModule(select_prefix(params, "shared_gate")) if experts.shared_gate else None
        )

    @property
    def static(self) -> bool:
        """True if no shape depends on the routing and the host reads nothing back: experts are on
        this rank (ep 1) and multiplied by the grouped_mm kernel, not by a loop over experts.
        """
        return self.kernel and self.ep.size == 1

    @property
    def balance_bias(self) -> Float[Tensor, " experts"] | None:
        """Balance bias of the router [experts]; None if the router has none."""
        return self.router.bias

    def units(self) -> list[Unit]:
        """Return the FSDP units of the layer: the router, gathered in the dtype it is stored
        in, and the experts, sharded over edp.
        """
        return [Unit(self.router, precise=True), Unit(self.experts, experts=True)]

    def forward(
        self, x: Float[Tensor, "here hidden"], inputs: LayerInputs
    ) -> Float[Tensor, "here hidden"]:
        """Route the tokens, dispatch them to the ranks of their experts, compute, combine, and add
        the shared expert. Calls `inputs.on_routing` with the chosen experts [n, k], and adds the
        router losses to the gradient if `inputs.balance` is set.
        """
        exact = self.tp.exact is not None
        # under sequence parallelism tokens are gathered: every tp rank routes all of them alike
        entered = self.tp.gather_replicated(x) if exact else self.tp.enter(x)
        logits, routing = self.router(entered, inputs.forced_experts)
        if inputs.on_routing is not None:
            inputs.on_routing(routing.experts)
        # [n, k]
        weights = routing.weights
        if inputs.balance is not None and torch.is_grad_enabled():
            weights = self._add_router_losses(logits, routing, inputs.batch, inputs.balance)
        # n k rows, sorted by expert: those of one expert are one matrix product
        order = moe.sort(routing.experts, self.number)
        parts = self._parts(inputs.batch)
        leaves = moe.sequence_counts(routing.experts, parts, self.number) if exact else None
        # all-to-all: each row goes to the ep rank of its expert
        rows, trip = expert.dispatch(
            moe.spread(entered, order, exact), order.counts, self.ep, self.kernel, leaves
        )
        rows = expert.combine(self.experts(rows, trip.groups, trip.leaves), trip, self.ep)
        # back in the order of tokens, sum over k of weight * row
        y = moe.combine(rows, weights, order, exact)
        if exact:
            # whole on every rank of tp: (a0 + b0) + (a1 + b1) is not (a0 + a1) + (b0 + b1)
            y = self.tp.split_replicated(y)
            return y if self.shared is None else y + self._exact_shared_expert(x, entered, inputs)
        return self.tp.leave(
            y if self.shared is None else y + self._shared_expert(self.shared, entered, inputs)
        )

    def _parts(self, batch: int) -> int:
        """Return the number of parts into which this rank's tokens of `batch` sequences are cut:
        with exact numerics pairs of chunks, where gradients are kept; else sequences.
        """
        # without gradients tokens may be those of a cache, of any number
        return batch * (self.cp.pairs // self.cp.axis.size if torch.is_grad_enabled() else 1)

    def _shared_expert(
        self, shared: MLP, x: Float[Tensor, "n hidden"], inputs: LayerInputs
    ) -> Float[Tensor, "n hidden"]:
        """Return the output of the `shared` expert for x as a partial sum over tp, times the
        sigmoid of its gate if it has one. x is the same on all ranks of tp.
        """
        y = shared.part(x, inputs)
        if self.shared_gate is None:
            return y
        # the gate [n, 1] is the same on all ranks of tp, so it may multiply partial sums
        return y * F.linear(x, local(self.shared_gate.weight)).sigmoid()

    def _exact_shared_expert(
        self,
        x: Float[Tensor, "here hidden"],
        entered: Float[Tensor, "n hidden"],
        inputs: LayerInputs,
    ) -> Float[Tensor, "here hidden"]:
        """Return the output of the shared expert for this rank's tokens x, times the sigmoid of its
        gate if it has one, with exact numerics. `entered`: all tokens, whose gates every rank of tp
        computes, so that the gate's gradient is whole on each.
        """
        assert self.shared is not None
        y = self.shared(x, inputs)
        if self.shared_gate is None:
            return y
        (logits,) = tensor.products(entered, [Linear(local(self.shared_gate.weight))], self.tp)
        return y * self.tp.split_replicated(invariant.sigmoid(logits))

    def _add_router_losses(
        self, logits: Tensor, routing: moe.Routing, batch: int, balance: RouterLosses
    ) -> Tensor:
        """Return the routing weights, unchanged in value: in backward, balance and z losses of
        `batch` sequences enter the gradient through them, and expert counts and losses are added to
        the tally.

        Every rank of tp computes the same losses, and the gradients of x and of the router are
        summed over tp: each gives its part. With exact numerics they are whole on each rank. Only
        counts need the whole sequence: under cp the losses are sums over this rank's tokens.
        """
        # tokens of a whole sequence
        length = len(logits) // batch * self.cp.axis.size
        parts = self._parts(batch)
        # counts of this rank's tokens, [batch, experts]
        here = moe.sequence_counts(routing.experts, batch, self.number)
        exact = self.tp.exact is not None
        uneven = moe.balance_losses(
            routing.probabilities,
            collectives.reduce_scalar(here, self.cp.axis).repeat_interleave(parts // batch, 0),
            length,
            self.k,
        )
        # mean square of logsumexp (ST-MoE, 2202.08906, eq. 5), per sequence
        z = moe.z_losses(logits, parts, length)
        losses = torch.stack((uneven, z), 1)
        statistics = (round_losses(losses.detach()) if exact else losses.detach().double()).sum(0)
        loss = (self.balance * uneven + self.z * z).sum()
        if not exact:
            # each rank of tp adds 1 / tp of the loss, and the sum over tp makes it whole
            loss = loss / self.tp.axis.size
        # tally: counts of each expert, balance loss, z loss; float64 counts exactly beyond 2^24
        statistics = torch.cat([here.sum(0).double(), statistics])
        return _RouterLossGradient.apply(
            routing.weights, loss, balance.scale, statistics, balance.tally
        )


class _RouterLossGradient(TypedFunction):
    """The identity on `weights`. Backward gives `loss` the gradient `scale`, and `tally` the
    gradient `statistics` (counts and loss values): once per microbatch, however often forward was
    run.
    """

    @staticmethod
    def forward(
        ctx: Context[torch.dtype],
        weights: Tensor,
        loss: Tensor,
        scale: Tensor,
        statistics: Tensor,
        tally: Tensor,
    ) -> Tensor:
        """Return `weights`; save `scale` and `statistics` for backward."""
        ctx.kept = loss.dtype
        ctx.save_for_backward(scale, statistics)
        # a new tensor, as autograd requires of an output that equals an input
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Context[torch.dtype], g: Tensor) -> tuple[Tensor, Tensor, None, None, Tensor]:
        """Return the gradients: g for weights, `scale` for loss, `statistics` for tally, None for
        the other two.
        """
        scale, statistics = ctx.saved_tensors
        return g, scale.to(ctx.kept), None, None, statistics
