"""Modules that own parameters, made from their `ParamSpec`s, and a parameter's placement and
gradient type on this rank.

A module's parameters are stored whole on meta, then split by `placements`. `linear` returns what
multiplies x: weight, bias, LoRA adapter, fp8 rounding and int8 scale in one tuple, which
parallel/tensor.py consumes, so that no module repeats these combinations. Without gradients it can
return faster forms: a packed copy of the weight (`prepack`), the packed form alone
(`free_weights`), or several adapters for different tokens (`set_multi_lora`). Weights that multiply
the same input are packed as one (`fuse`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dolmen.core import device, profiling, state
from dolmen.core.mesh import SINGLE, Axis
from dolmen.core.state import Places, Replicate, Shard, local, local_view
from dolmen.core.torch_private import compute
from dolmen.model import spec
from dolmen.model.spec import ParamSpec, ParamSpecs
from dolmen.ops import invariant
from dolmen.ops.kernels import Kernels
from dolmen.ops.norm import SumRows, layer_norm, rms_norm
from dolmen.parallel import tensor, vocabulary
from dolmen.parallel.inference_linear import MultiLora, Weights, prepack, prepack_together
from dolmen.parallel.quantized_product import Delayed, Rounding
from dolmen.parallel.tensor import Adapter, Linear, TensorParallel


def placements(param: ParamSpec, sizes: Mapping[str, int]) -> Places:
    """Return a parameter's placement: on tp, or, for an expert's parameter, on (ep, tp). `sizes`:
    ranks of each axis. A dim whose units the axis does not divide is replicated if its spec allows
    that.
    """
    on = {
        cut.axis: Shard(cut.dim) if cut.splits(sizes[cut.axis]) else Replicate()
        for cut in param.shards
    }
    tp = on.get("tp", Replicate())
    return (on["ep"], tp) if "ep" in on else tp


def is_partial(param: ParamSpec, tp: TensorParallel) -> bool:
    """Return whether each tp rank has only a partial sum of a parameter's gradient, to be
    all-reduced over tp; never for a parameter sharded over tp.
    """
    if any(cut.axis == "tp" and cut.splits(tp.axis.size) for cut in param.shards):
        return False
    return {"own": False, "residual": tp.residual_partial, "branch": tp.branch_partial}[
        param.gradient
    ]


def fp8_rounding(param: ParamSpec) -> Rounding | None:
    """Return how a weight's products are rounded to fp8: the recipe, which dim tp splits, and
    delayed-scaling state (not yet on a device); None if the weight is not multiplied in fp8.
    """
    if param.fp8 is None:
        return None
    # one amax history per expert
    experts = param.shape[0] if param.stacked else None
    delayed = Delayed(param.fp8, experts) if param.fp8.delayed else None
    return Rounding(param.fp8, tp_cut(param), param.stacked, delayed)


def tp_cut(param: ParamSpec) -> Literal["inputs", "outputs"] | None:
    """Return which dim of a matrix tp splits; None if every rank has all of it."""
    # dim of outputs: 0, or 1 of stacked experts [experts, out, in]
    outputs = len(param.shape) - 2
    dims = [cut.dim for cut in param.shards if cut.axis == "tp"]
    return None if not dims else "outputs" if dims[0] == outputs else "inputs"


def _prepack(linears: Sequence[Linear], weights: Weights, inputs: Axis) -> list[Linear]:
    """Return `linears`, which share an input, with one packed copy of their weights (adapters
    merged in) in the format `weights`; unchanged for stacked experts, int8 weights and DoRA, which
    have no packed form. `inputs`: the axis that cuts the weights' inputs.
    """
    if len(linears) > 1 and not all(_can_prepack(linear) for linear in linears):
        return [packed for linear in linears for packed in _prepack([linear], weights, inputs)]
    if not _can_prepack(linears[0]):
        return list(linears)
    merged = [linear.merge(linear.weight.dtype) for linear in linears]
    if len(merged) == 1:
        return [linears[0]._replace(prepacked=prepack(merged[0], weights, inputs))]
    packed = prepack_together(merged, weights)
    return [linear._replace(prepacked=part) for linear, part in zip(linears, packed, strict=True)]


def _can_prepack(linear: Linear) -> bool:
    """Return True unless the weight is stacked experts or 8-bit, or has DoRA."""
    gained = linear.adapter is not None and linear.adapter.magnitude is not None
    return linear.weight.ndim == 2 and linear.scale is None and not gained


def _freed_message(weights: Weights) -> str:
    """Return the start of the error message for uses of a weight that was freed after packing."""
    return f"the model was loaded with only {weights} weights: load it again"


class ParameterModule(nn.Module):
    """Owns the parameters in `params`: a weight, perhaps a bias, LoRA's A and B, DoRA's magnitude,
    and an int8 weight's scale.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_A: nn.Parameter | None
    lora_B: nn.Parameter | None
    lora_magnitude: nn.Parameter | None
    weight_scale: nn.Parameter | None
    only_multiplies = False
    """True if the weight is used by `linear` only."""
    input_axis = SINGLE.tp
    """Axis that cuts the weight's inputs, where it is row-parallel."""

    def __init__(self, params: ParamSpecs, local_rows: Callable[[Tensor], Tensor] = local):
        """Register the parameters of `params`, each of its whole shape on meta. `local_rows`
        selects, of a tensor with one row per output, the rows that this rank multiplies by
        (default: its local shard).
        """
        super().__init__()
        self.local_rows = local_rows
        self.bias = self.lora_A = self.lora_B = self.lora_magnitude = self.weight_scale = None
        self.lora_scale = params["lora_B"].scale if "lora_B" in params else 1.0
        cuts = params["weight"].shards if "lora_B" in params else ()
        inputs = len(params["weight"].shape) - 1 if "lora_B" in params else 0
        # a row-parallel weight: A is split with it, and A x is a partial sum over tp
        self.over_inputs = any(cut.axis == "tp" and cut.dim == inputs for cut in cuts)
        self.rounding = fp8_rounding(params["weight"]) if "weight" in params else None
        self.cut: Literal["inputs", "outputs"] | None = (
            tp_cut(params["weight"]) if "weight" in params else None
        )
        self.fused: tuple[ParameterModule, ...] = (self,)
        """Modules that multiply the same input, this one among them: packed as one matrix."""
        self._prepack_as: Weights | None = None
        self._prepacked: tuple[tuple[object, ...], Linear] | None = None
        self._freed: tuple[Weights, Linear] | None = None
        self._multi_lora: MultiLora | None = None
        self._local_multi_lora: MultiLora | None = None
        for name, param in params.items():
            # full shape, on meta (build.py): sharding replaces it by this rank's part
            weight = torch.empty(param.shape, dtype=torch.int8 if param.int8 else None)
            setattr(self, name, nn.Parameter(weight, requires_grad=param.trained))

    def linear(self) -> Linear:
        """Return what multiplies x: weight, bias, adapter, rounding; a packed weight and multi-LoRA
        adapters if set and gradients are off. Raises ValueError for gradients of a freed weight.
        """
        current = self._current_linear()
        if self._multi_lora is None or torch.is_grad_enabled():
            return current
        # cut once per set of adapters, not at each forward
        if self._local_multi_lora is None:
            self._local_multi_lora = self._multi_lora.cut(self.local_rows)
        return current._replace(several=self._local_multi_lora)

    def set_multi_lora(self, several: MultiLora | None) -> None:
        """Set the multi-LoRA adapters that this module's products with its weight apply while
        gradients are off; None removes them. They have the output rows that this rank stores; the
        rows that it multiplies by are selected at first use.
        """
        self._multi_lora, self._local_multi_lora = several, None

    def _current_linear(self) -> Linear:
        """Return the freed packed form, a packed copy (made at first use), or the plain weight,
        whichever is available. Raises ValueError if the weight was freed and gradients are enabled.
        """
        if self._freed is not None:
            if torch.is_grad_enabled():
                raise ValueError(
                    f"{_freed_message(self._freed[0])}, so the model cannot be trained"
                )
            return self._freed[1]
        if self._prepack_as is None or torch.is_grad_enabled():
            return self.plain_linear()
        if self._prepacked is None:
            for module, linear in zip(self.fused, self._pack(self._prepack_as), strict=True):
                module.keep_prepacked(self._prepack_as, linear)
        assert self._prepacked is not None
        return self._prepacked[1]

    def _pack(self, weights: Weights) -> list[Linear]:
        """Return the linears of `fused` with a packed copy of their weights."""
        return _prepack([module.plain_linear() for module in self.fused], weights, self.input_axis)

    def keep_prepacked(self, weights: Weights, linear: Linear) -> None:
        """Store `linear`, which has a weight packed in the format `weights`, for reuse until a
        tensor of the module changes.
        """
        self._prepacked = self._state(weights), linear

    def free_weights(self, weights: Weights) -> None:
        """Replace the weights of `fused` permanently by their packed form and free their memory:
        the parameters keep their shapes on meta, without values. Adapters are merged into the
        packed form. Does nothing to weights that cannot be packed.
        """
        for module, linear in zip(self.fused, self._pack(weights), strict=True):
            if linear.prepacked is not None:
                module.replace_weight(weights, linear)

    def replace_weight(self, weights: Weights, linear: Linear) -> None:
        """Compute with `linear`, whose weight is packed as `weights`, from now on. Frees the
        weight permanently: an empty meta parameter of its name and shape stays, and the model
        cannot be trained any more.
        """
        # keeps name and shape, for checks and for counting
        gone = torch.empty_like(local_view(self.weight), device="meta")
        self.weight = nn.Parameter(state.tensor_like(self.weight, gone), self.weight.requires_grad)
        with torch.no_grad():
            # adapters are in it
            self._freed = (
                weights,
                linear._replace(weight=self.local_rows(self.weight), adapter=None),
            )

    def prepack(self, weights: Weights) -> None:
        """Make `linear` use a packed copy of the weight where no gradient is kept. The copy is made
        at first use, kept beside the weight, and reused while the weight is unchanged. Raises
        ValueError if the weight was freed in another format.
        """
        if self._freed is not None and self._freed[0] != weights:
            raise ValueError(f"{_freed_message(self._freed[0])}, but {weights} ones are needed")
        # an optimizer step has changed a weight since
        if any(module.needs_packing(weights) for module in self.fused):
            self._prepacked = None
        self._prepack_as = weights

    def needs_packing(self, weights: Weights) -> bool:
        """Return True if there is no packed copy, or the module has changed since it was made."""
        return self._prepacked is None or self._prepacked[0] != self._state(weights)

    def disable_prepack(self, keep: bool) -> None:
        """Stop using packed copies. `keep`: retain the copy for the next `prepack`, which reuses it
        if the weight is unchanged; otherwise free it.
        """
        self._prepack_as = None
        if not keep:
            self._prepacked = None

    def _state(self, weights: Weights) -> tuple[object, ...]:
        """Return a key that changes whenever a tensor of the module is written or replaced: the
        packing format, and address and version counter of each tensor.
        """
        tensors = (self.weight, self.bias, self.lora_A, self.lora_B)
        tensors_ = [p for p in (*tensors, self.lora_magnitude, self.weight_scale) if p is not None]
        # what is written is what a DTensor holds, and not the DTensor
        return weights, *((p.data_ptr(), compute.version_of(p)) for p in map(local_view, tensors_))

    def plain_linear(self) -> Linear:
        """Return the local weight, bias, adapter, fp8 rounding and int8 scale, without packing."""
        local_rows = self.local_rows
        bias = None if self.bias is None else local_rows(self.bias)
        adapter = None
        if self.lora_A is not None and self.lora_B is not None:
            length = None if self.lora_magnitude is None else local_rows(self.lora_magnitude)
            # A has the weight's inputs, B its outputs
            down, up = local(self.lora_A), local_rows(self.lora_B)
            adapter = Adapter(down, up, self.lora_scale, length, self.over_inputs)
        scale = None if self.weight_scale is None else local_rows(self.weight_scale)
        return Linear(local_rows(self.weight), bias, adapter, self.rounding, scale, cut=self.cut)


def fuse(*modules: ParameterModule) -> None:
    """Let linears that multiply the same input be packed as one matrix, without gradients: sets
    `fused` of each to all of them.
    """
    for module in modules:
        module.fused = modules


class ColumnParallelLinear(ParameterModule):
    """Parameters of a column-parallel linear, W split over its outputs. Has no forward:
    `tensor.columns` multiplies by several of them at once.
    """

    only_multiplies = True


class RowParallelLinear(ParameterModule):
    """Row-parallel linear y = x W^T + b, W split over its inputs: x S(1)@tp -> y I@tp, or S(0)@tp
    under sequence parallelism.
    """

    only_multiplies = True

    def __init__(self, params: ParamSpecs, tp: TensorParallel):
        """Register weight and bias of `params`; `tp`: the axis over which forward sums."""
        super().__init__(params)
        self.tp, self.input_axis = tp, tp.axis

    def forward(self, x: Float[Tensor, "tokens in"]) -> Float[Tensor, "here out"]:
        """Return the product summed over tp by an all-reduce, or by a reduce-scatter over tokens
        under sequence parallelism; the bias is added after the sum.
        """
        return tensor.rows([x], [self.linear()], self.tp)


class Norm(ParameterModule):
    """RMSNorm or LayerNorm over the last dim; with a weight [heads, size], over each head with its
    own weight. `sum_rows`: with exact numerics, how gradients of weight and bias are added; None:
    as those of a norm of the residual stream.
    """

    def __init__(
        self,
        norm: spec.NormSpec,
        params: ParamSpecs,
        kernels: Kernels,
        sum_rows: SumRows | None = None,
    ):
        """Register the weight and bias of `params`, if any, and keep kind and eps of the spec
        `norm`.
        """
        super().__init__(params)
        self.eps = norm.eps
        self.kernel: Literal["passes", "fused"] = kernels.norm
        if sum_rows is None and kernels.exact is not None:
            sum_rows = partial(invariant.sum_tokens, leaf=kernels.exact.token_leaf)
        self.sum_rows = sum_rows
        self.centres, self.zero_centred = norm.kind == "layernorm", norm.zero_centred
        self.affine = norm.affine

    def forward(
        self, x: Float[Tensor, "*rows size"], local_rows: Callable[[Tensor], Tensor] = local
    ) -> Float[Tensor, "*rows size"]:
        """Normalise x over its last dim (RMSNorm or LayerNorm, as the spec says) and multiply by
        the weight, if there is one. `local_rows` selects, of a per-head weight [heads, size], the
        rows of x's heads.
        """
        with profiling.record_range("norm"):
            # OLMo: no weight and no bias
            weight = local_rows(self.weight) if self.affine else None
            if not self.centres and weight is not None:
                return rms_norm(x, weight, self.eps, self.kernel, self.zero_centred, self.sum_rows)
            bias = None if self.bias is None else local(self.bias)
            if self.sum_rows is not None:
                return layer_norm(x, weight, bias, self.eps, self.sum_rows)
            if weight is not None and weight.ndim == 2:
                # per-head LayerNorm (Cohere, StableLM)
                return F.layer_norm(x, (x.shape[-1],), None, None, self.eps) * weight
            return F.layer_norm(x, (x.shape[-1],), weight, bias, self.eps)


class Embedding(ParameterModule):
    """Vocabulary-parallel embedding, times its scale: tokens [n] -> [n, hidden] I@tp, or S(0)@tp. A
    tied head uses the same weight without the scale.
    """

    def __init__(self, embedding: spec.EmbeddingSpec, params: ParamSpecs, tp: TensorParallel):
        """Register the table of `params`, sharded by rows over tp, and keep size and scale of the
        spec.
        """
        super().__init__(params)
        self.vocab_size, self.scale, self.tp = embedding.rows, embedding.scale, tp

    def forward(self, tokens: Int[Tensor, " tokens"]) -> Float[Tensor, "here hidden"]:
        """Return the scaled embeddings of tokens, which are the same on every rank of tp."""
        # rows of other ranks' tokens are zero, then summed over tp (reduce-scattered under sp)
        x = vocabulary.embed(tokens, local(self.weight), self.vocab_size, self.tp)
        if self.scale == 1:
            return x
        # rounded to x's dtype, as in transformers: sqrt(3072) = 55.43 is 55.5 in bf16
        return x * device.scalar_tensor(self.scale, x.dtype, x.device)


class PositionEmbedding(ParameterModule):
    """Learned position embedding (GPT-2), replicated over tp: positions [n] -> [n, hidden]."""

    def __init__(self, table: spec.PositionTable, params: ParamSpecs, kernels: Kernels):
        """Register the table of `params`, and keep the spec's row offset."""
        super().__init__(params)
        self.offset, exact = table.offset, kernels.exact
        self.look_up: Callable[[Tensor, Tensor], Tensor] = (
            F.embedding if exact is None else partial(invariant.embedding, leaf=exact.token_leaf)
        )

    def forward(self, positions: Int[Tensor, " here"]) -> Float[Tensor, "here hidden"]:
        """Return the table's rows of `positions`; row `offset` belongs to position 0."""
        return self.look_up(positions + self.offset, local(self.weight))


class ReplicatedLinear(ParameterModule):
    """y = x W^T + b of this rank's tokens, with W and b stored whole on every rank of tp: x I@tp
    (or S(0)@tp) -> the same.
    """

    only_multiplies = True

    def __init__(self, params: ParamSpecs, tp: TensorParallel):
        """Register weight and bias of `params`, whole on every rank of tp."""
        super().__init__(params)
        self.tp = tp

    def forward(self, x: Float[Tensor, "here in"]) -> Float[Tensor, "here out"]:
        """Return the product; nothing is communicated."""
        return tensor.products(x, [self.linear()], self.tp)[0]
