"""A side that transformers computes: its own program, on one process, under our names.

The weight rules of a family say which of our parameters each of its modules holds; so what such a
module is given and makes is known by the same rules, and no code here is of a family:

    model.layers.0.self_attn.qkv_proj.weight   holds   layers.0.attn.q, .k, .v .weight
    what that module makes                     holds   layers.0.attn.q, .k, .v
    what the modules under model.layers.0.self_attn have in common makes    layers.0.attn

Which columns of a fused product are which of ours, the rule says of the numbers of its columns, as
if they were its bias. What no module makes (queries and keys as they attend) is seen where the
model calls its attention.
"""

import os.path
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dolmen.comparison.dolmen_side import DiffTask
from dolmen.comparison.recording import MOMENTS, Recorder, Tensors
from dolmen.conversion.hf_export import transformers_folder
from dolmen.conversion.source import ModelSource
from dolmen.conversion.weights import split_stored
from dolmen.core.torch_private import hub
from dolmen.evaluation import reference_model
from dolmen.evaluation.validate import batch_of
from dolmen.families import ModelConfig, weight_map
from dolmen.families.rules import StoredTensor
from dolmen.model.spec.param import ParamSpec

ATTENTION = "dolmen_seen"


def record(
    source: ModelSource, task: DiffTask, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensors:
    """Record what transformers computes for the source: weights, activations, gradients and one
    update by torch.optim.AdamW, to the depth that the task specifies. Exports the source to a
    temporary folder if transformers cannot load it. Raises as `transformers_folder`.
    """
    recorder, model = Recorder(), source.model
    with reference_model.quiet_transformers(), transformers_folder(source) as folder:
        network = reference_model.load_reference(folder, model, dtype, device)
    named = dict(network.named_parameters())
    known = weight_map(model)
    # buffers too, such as the bias that balances a router; but no head that is the embedding
    stored = hub.revert_weight_names(network, network.state_dict())
    stored = {name: t for name, t in stored.items() if known.canonical(name) in known.entries}
    weights = reference_model.tensors_by_our_names(model, stored)
    for name, weight in weights.items():
        recorder.add_whole("weights", name, weight)
    if not task.reaches("forward"):
        return recorder.tensors
    batch = batch_of(model.spec, task.windows)
    gradients = task.reaches("backward")
    with torch.set_grad_enabled(gradients), _TransformersHooks(network, model, recorder, gradients):
        logits, loss = reference_model.logits_and_loss(network, model, batch)
        recorder.add_whole("forward", "logits", logits.flatten(0, 1))
        recorder.add_number("loss", loss.item())
        if gradients:
            loss.backward()
    if gradients:
        stored = hub.revert_weight_names(network, {n: p.grad for n, p in named.items()})
        _record_update(
            recorder, model, task, weights, reference_model.tensors_by_our_names(model, stored)
        )
    return recorder.tensors


def _record_update(
    recorder: Recorder,
    model: ModelConfig,
    task: DiffTask,
    weights: dict[str, Tensor],
    gradients: dict[str, Tensor],
) -> None:
    """Record gradients, their norm, and one torch.optim.AdamW update of `weights` (parameter name
    -> tensor) in fp32 or wider; the update only if the task asks for it.
    """
    for name, gradient in gradients.items():
        recorder.add_whole("gradients", name, gradient)
    params, config = model.spec.params, task.optimizer
    parameters = {}
    for name, gradient in gradients.items():
        wide = torch.promote_types(gradient.dtype, torch.float32)
        parameters[name] = nn.Parameter(weights[name].detach().to(wide, copy=True))
        parameters[name].grad = gradient.to(wide, copy=True)
    # clip_grad_norm_ returns the norm even where it clips nothing
    most = config.clip if config.clip > 0 else torch.inf
    norm = nn.utils.clip_grad_norm_(parameters.values(), most)
    recorder.add_number("gradient norm", norm.item())
    if not task.reaches("update"):
        return
    # decay for matrices only, as dolmen's optimizer has it
    groups = [
        {
            "params": [p for name, p in parameters.items() if params[name].decays == decays],
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps
    )
    before = {name: p.detach().clone() for name, p in parameters.items()}
    adamw.step()
    for name, p in parameters.items():
        for kind in MOMENTS:
            recorder.add_whole(kind, name, adamw.state[p][kind])
        recorder.add_whole("update", name, p.detach() - before[name])


class _TransformersHooks:
    """Context manager with hooks on a transformers model that record under our names. `gradients`:
    record gradients of activations too.
    """

    def __init__(self, network: Any, model: ModelConfig, recorder: Recorder, gradients: bool):
        """Look up which modules of `network` hold which parameters of `model`; no hook is
        registered yet.
        """
        self.network, self.model = network, model
        self.recorder, self.gradients = recorder, gradients
        self.modules: dict[str, nn.Module] = dict(network.named_modules())
        self.entries = [
            entry
            for entry in weight_map(model).entries.values()
            # experts that transformers has one by one see other tokens each: not recorded
            if entry.piece is None and _module(entry) in self.modules
        ]
        self.stack = ExitStack()

    def __enter__(self) -> None:
        """Register hooks on modules that own weights, on attention and MLP modules, on whole
        layers, and on the attention function.
        """
        for entry in self.entries:
            param = self.model.spec.params[entry.ours[0]]
            ours = tuple(name.rpartition(".")[0] for name in entry.ours)
            if entry.hf.endswith(".weight"):
                self._hook_owner(self.modules[_module(entry)], entry, ours, param)
        layers: dict[nn.Module, int] = {}
        for number in range(self.model.spec.layers):
            layer = self._common_module(f"layers.{number}.")
            for part in ("attn", "mlp"):
                inner = self._common_module(f"layers.{number}.{part}.")
                if inner is not None and inner is not layer:
                    self._hook_output(inner, f"layers.{number}.{part}")
            if layer is not None:
                # attention is observed by module: this maps it to its layer
                layers |= dict.fromkeys(layer.modules(), number)
                self._hook_output(layer, f"layers.{number}")
                if number == 0:
                    self._hook_input(layer, "embed")
        see = hub.observe_attention(
            self.network, ATTENTION, partial(self._record_attention, layers)
        )
        self.stack.enter_context(see)

    def __exit__(self, *_: object) -> None:
        """Remove all hooks."""
        self.stack.close()

    def _common_module(self, ours: str) -> nn.Module | None:
        """Return the innermost module of transformers that holds all parameters whose names here
        begin with `ours`; None where that is a single parameter's own module.
        """
        owners = {_module(entry) for entry in self.entries if entry.ours[0].startswith(ours)}
        if len(owners) < 2:
            return None
        # of lists of names, so that layers.1 is no prefix of layers.10
        path = os.path.commonprefix([owner.split(".") for owner in owners])
        return self.modules.get(".".join(path))

    def _hook_owner(
        self, module: nn.Module, entry: StoredTensor, ours: Sequence[str], param: ParamSpec
    ) -> None:
        """Register hooks on a module that owns the weights of our modules `ours`: they record its
        output, split into our projections where it is fused, or, for output projections, its input.
        """
        name = ours[0]
        if param.role in ("norm", "router"):
            self._hook_output(module, name)
            if name.endswith(".mlp_norm"):
                self._hook_input(module, name.replace("mlp_norm", "middle"))
        elif name.endswith((".attn.o", ".mlp.down")):
            self._hook_input(
                module, name.replace("attn.o", "attn.sums").replace("mlp.down", "mlp.act")
            )
        elif param.role == "matrix" and name.startswith("layers."):
            # rows of the fused weight: columns of its output
            out = sum(self.model.spec.params[f"{name}.weight"].shape[0] for name in ours)
            # the rule, applied to column numbers, gives those that belong to q, k and v
            columns = list(split_stored(entry.rule, torch.arange(out)))
            for parameter, which in zip(ours, columns, strict=True):
                self._hook_output(module, parameter, which)

    def _hook_output(self, module: nn.Module, name: str, columns: Tensor | None = None) -> None:
        """Register a hook that records the module's output as tensor `name`; `columns`: those of a
        fused output that belong to it.
        """

        def see(_: nn.Module, args: Any, out: Any) -> None:
            """Record the module's output, or the first of a tuple: a forward hook."""
            self._record(name, out[0] if isinstance(out, tuple) else out, columns)

        self.stack.callback(module.register_forward_hook(see).remove)

    def _hook_input(self, module: nn.Module, name: str) -> None:
        """Register a hook that records the module's first input as tensor `name`."""

        def see(_: nn.Module, args: tuple, options: dict[str, Any]) -> None:
            """Record the module's first argument: a forward pre-hook."""
            self._record(name, args[0] if args else options["hidden_states"])

        self.stack.callback(module.register_forward_pre_hook(see, with_kwargs=True).remove)

    def _record_attention(
        self, layers: dict[nn.Module, int], module: nn.Module, tensors: dict[str, Tensor]
    ) -> None:
        """Record the queries, keys and values ([batch, heads, length, size], by name in `tensors`)
        of the layer that contains `module`, if one does; `layers`: module -> layer number.
        """
        for word, x in tensors.items():
            if module in layers:
                self._record(f"layers.{layers[module]}.attn.{word}", x, heads_first=True)

    def _record(
        self, name: str, x: Any, columns: Tensor | None = None, heads_first: bool = False
    ) -> None:
        """Record x of shape [batch, length, features], [batch, length, heads, size] ([batch, heads,
        length, size] if `heads_first`) or [tokens, features], as tensor `name` with all tokens in
        one dim, and its gradient. Only the first call per name is recorded.
        """
        if not isinstance(x, Tensor):
            return

        def flat(x: Tensor) -> Tensor:
            """Return x as a matrix [tokens, columns], its heads side by side."""
            x = x.transpose(1, 2) if heads_first else x
            x = x.reshape(-1, x.shape[-1]) if x.ndim < 4 else x.flatten(2).flatten(0, 1)
            return x if columns is None else x[:, columns.to(x.device)]

        if ("forward", name) in self.recorder.tensors:
            return  # a module that is called twice is not what its first call was
        self.recorder.add_whole("forward", name, flat(x))
        if self.gradients and x.requires_grad:
            x.register_hook(lambda g: self.recorder.add_whole("backward", name, flat(g)))


def _module(entry: StoredTensor) -> str:
    """Return the name of the module that owns a stored tensor: its name without the last part."""
    return entry.hf.rpartition(".")[0]
