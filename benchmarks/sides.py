"""The sides that are compared: dolmen's own training step, and others that train the same model on
the same data with the same arithmetic: fp32 masters, bf16 compute, fused AdamW and clipping. A side
is a function that makes one step and gives its loss. They take turns (`turns`).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu import house
from dolmen.core import mesh as meshes
from dolmen.families import ModelConfig
from dolmen.model import build
from dolmen.model.count import training_flops_per_token
from dolmen.model.decoder import Decoder
from dolmen.model.layout import Layout
from dolmen.training.step import optimizer_step

OPTIMIZER = house.OPTIMIZER


def drawn(model: Decoder) -> None:
    """What `dolmen train` begins with."""
    build.initialize(model, 0)


@dataclass(frozen=True)
class Work:
    """What every side does in a step: `batch` sequences at once, from values that `initial` gives a
    model of dolmen's.
    """

    model: ModelConfig
    sequence: int
    batch: int
    initial: Callable[[Decoder], None] = drawn

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def flops(self) -> float:
        """Of the model, whoever computes it, without what is computed again."""
        return self.tokens * training_flops_per_token(self.model.spec, self.sequence)

    def __str__(self) -> str:
        """For a person."""
        spec = self.model.spec
        return (
            f"{self.batch} x {self.sequence} tokens; hidden {spec.hidden_size}, "
            f"{spec.layers} layers, {spec.blocks[0].mixer.words}, ffn {spec.blocks[0].mlp.size}, "
            f"vocabulary {spec.vocab_size}"
        )


Side = Callable[[], torch.Tensor | float]


def batch_of(work, device):
    batch = house.batch(work.model.spec, work.batch, work.sequence).to(device)
    return batch.tokens, batch.labels


def dolmen_side(work, mesh, compile, sequence=False):
    """This project: the training loop's own step."""
    layout = Layout(tp=mesh.tp.size, sequence_parallel=sequence)
    state = house.training(
        work.model.spec, mesh, work.batch, layout=layout, compile=compile, initial=work.initial
    )
    batch = house.batch(work.model.spec, work.batch, work.sequence)
    return lambda: optimizer_step(state, batch, mesh).loss


def transformers_model(work, device, dtype, attention):
    """The same model in transformers, with the same initial weights."""
    content = work.model.export_config()
    with device:
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**content), attn_implementation=attention, dtype=dtype
        )
    copy_weights(work, model, device, _hf_name)
    return model.train()


def copy_weights(work, model, device, named):
    """The values that dolmen's model begins with, in `model`, whose names `named` gives."""
    ours = build.build(work.model.spec, replace(meshes.SINGLE, device=device))
    work.initial(ours)
    theirs, given = dict(model.named_parameters()), dict(ours.named_parameters())
    assert len(theirs) == len(given)
    with torch.no_grad():
        for name, p in given.items():
            theirs[named(name)].copy_(p)


def _hf_name(name):
    for ours, theirs in (
        ("attn_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        ("embed.", "model.embed_tokens."),
        ("head.", "lm_head."),
        ("final_norm", "model.norm"),
        ("layers.", "model.layers."),
    ):
        name = name.replace(ours, theirs)
    for ours, theirs in (("attn", "self_attn"), ("mlp", "mlp")):
        for p in "qkvo" if ours == "attn" else ("gate", "up", "down"):
            name = name.replace(f".{ours}.{p}.", f".{theirs}.{p}_proj.")
    return name


def decay_groups(parameters):
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def fused_adamw(parameters):
    o = OPTIMIZER
    return torch.optim.AdamW(
        decay_groups(parameters), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True
    )


def mean_loss(logits, labels):
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def masters_side(work, mesh, compile, attention="sdpa"):
    """transformers in bf16, whole model and loss compiled as one graph, with fp32 masters beside
    it.
    """
    model = transformers_model(work, mesh.device, torch.float32, attention)

    def loss_of(tokens, labels):
        return mean_loss(model(tokens, use_cache=False).logits, labels)

    return with_masters(model, work, mesh, torch.compile(loss_of) if compile else loss_of)


def clip(masters):
    torch.nn.utils.clip_grad_norm_(masters, OPTIMIZER.clip)


def with_masters(model, work, mesh, loss_of, clip=clip):
    """The model in bf16, and its fp32 masters beside it, which `clip` is given with their
    gradients.
    """
    copies = list(model.parameters())
    masters = [p.detach().clone() for p in copies]
    for m, p in zip(masters, copies, strict=True):
        m.grad, p.data = torch.zeros_like(m), p.data.bfloat16()
    optimizer, (tokens, labels) = fused_adamw(masters), batch_of(work, mesh.device)

    def step():
        loss = loss_of(tokens, labels)
        loss.backward()
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in copies])
        clip(masters)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, masters)
        for p in copies:
            p.grad = None
        return loss.detach()

    return step


def plain_step(loss_of, tokens, labels, model, optimizer):
    def step():
        loss = loss_of(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def fsdp_side(work, mesh, compile, attention="sdpa"):
    """transformers under FSDP2 mixed precision, compiled per layer; over tp with PyTorch's own
    parallelize_module.
    """
    model = transformers_model(work, mesh.device, torch.float32, attention)
    if mesh.tp.size > 1:
        _parallelize(model, mesh.grid["tp"])
    loss_of = mean_loss
    if compile:
        for layer in model.model.layers:
            layer.compile()
        if mesh.tp.size == 1:
            loss_of = torch.compile(mean_loss)
        else:
            model.model.embed_tokens.register_forward_hook(_arrived)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh.grid["fsdp"], mp_policy=policy, reshard_after_forward=False)
        if mesh.device.type == "cpu":
            module.set_force_sum_reduction_for_comms(True)
    optimizer, (tokens, labels) = fused_adamw(model.parameters()), batch_of(work, mesh.device)
    if mesh.tp.size == 1:
        return plain_step(
            lambda x, y: loss_of(model(x, use_cache=False).logits, y),
            tokens,
            labels,
            model,
            optimizer,
        )

    def step():
        with loss_parallel():
            loss = loss_of(model(tokens, use_cache=False).logits, labels)
            loss.backward()
        _clip_two_meshes(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().full_tensor()

    return step


def _arrived(module, given, out):
    """What the embedding has summed over tp, as a plain tensor. It is on its way when forward ends,
    an AsyncCollectiveTensor, and torch 2.13 forgets that such an input of a compiled function
    requires a gradient (pytorch#191113): the embedding would get none, without a word.
    """
    return out.clone()


def _clip_two_meshes(parameters):
    """PyTorch's clipping where linears lie on (dp, tp) and norms on dp alone, which it refuses to
    mix.
    """
    parts = [[p for p in parameters if p.device_mesh.ndim == n] for n in (1, 2)]
    norms = [torch.nn.utils.get_total_norm([p.grad for p in part]).full_tensor() for part in parts]
    total = torch.stack(norms).norm()
    for part in parts:
        torch._foreach_mul_(
            [p.grad.to_local() for p in part], (OPTIMIZER.clip / (total + 1e-6)).clamp(max=1.0)
        )


def _parallelize(model, grid):
    column, row = ColwiseParallel, RowwiseParallel
    parallelize_module(
        model,
        grid,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for layer in model.model.layers:
        parallelize_module(
            layer,
            grid,
            {
                "self_attn.q_proj": column(),
                "self_attn.k_proj": column(),
                "self_attn.v_proj": column(),
                "self_attn.o_proj": row(),
                "mlp.gate_proj": column(),
                "mlp.up_proj": column(),
                "mlp.down_proj": row(),
            },
        )


def turns(
    sides: Mapping[str, Side],
    rounds: int,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[tuple[float, float]]]:
    """Per side the (seconds, CPU seconds) of a step, of so many rounds in which each makes one;
    `before` is called before each.
    """
    out: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, step in sides.items():
            before()
            out[name].append(timed(step, device))
    return out


def timed(step: Side, device: torch.device) -> tuple[float, float]:
    """Seconds and CPU seconds of one step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start, cpu = time.perf_counter(), time.process_time()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - cpu
