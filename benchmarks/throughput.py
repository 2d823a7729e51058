"""Training throughput side by side with peers: one run, the same shapes, initial weights, data,
fp32 masters, bf16 compute, fused AdamW and clipping for all sides, and ratios at the end.

    python benchmarks/throughput.py
        on a CPU: one process of two threads, then tp=2 over two of one thread each
        on GPUs: about 1B parameters, sequence 4096, and the model FLOPs utilisation (MFU)

Sides take turns: every round times one step of each, and a ratio is the median over rounds of the
ratio within a round. CPU time is of this process: on a machine that others use it says more than
the clock (with one thread; waiting threads spin). One step is forward, loss, backward, clip, update
and new bf16 copies of the masters.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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

from dolmen import families
from dolmen.core import mesh as meshes
from dolmen.data.batch import Batch
from dolmen.model.config import ModelConfig
from dolmen.model.count import training_flops_per_token
from dolmen.model.layout import Layout
from dolmen.optim.optimizer import OptimizerConfig, adamw
from dolmen.train import build
from dolmen.train.step import TrainState, optimizer_step


@dataclass(frozen=True)
class Shape:
    """The model and the batch of every side."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    batch: int

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            max_position_embeddings=self.sequence,
        )

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def flops(self) -> float:
        return self.tokens * training_flops_per_token(self.config, self.sequence)


SHAPES = {
    "cpu": Shape(512, 8, 8, 4, 1536, 8192, 512, 8),
    "cuda": Shape(2048, 16, 16, 8, 8192, 32768, 4096, 4),
}
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}  # dense bf16 FLOP/s
OPTIMIZER = OptimizerConfig(lr=1e-4, schedule="constant")


def _batch(shape, device):
    text = torch.randint(
        shape.vocab, (shape.batch, shape.sequence + 1), generator=torch.Generator().manual_seed(1)
    ).to(device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def dolmen_side(shape, mesh, compile, sequence=False):
    """This project: the training loop's own step."""
    layout = Layout(tp=mesh.tp.size, dp=mesh.dp.size, sequence_parallel=sequence)
    schedule = layout.make_schedule(shape.batch, shape.batch // mesh.dp.size)
    model = build.build(
        shape.config, mesh, layout, schedule, compute=torch.bfloat16, compile=compile
    )
    build.initialize(model, seed=0)
    state = TrainState(model, adamw(model, OPTIMIZER), OPTIMIZER, 1000, layout.zero, schedule)
    batch = Batch(*(t.cpu() for t in _batch(shape, mesh.device)))
    return lambda: optimizer_step(state, batch, mesh).loss


def _transformers(shape, device, dtype, attention):
    """The same model in transformers, with the same initial weights."""
    content = families.to_hf(shape.config)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**content), attn_implementation=attention, dtype=dtype
    ).to(device)
    ours = build.build(shape.config, meshes.SINGLE)
    build.initialize(ours, seed=0)
    theirs, given = dict(model.named_parameters()), dict(ours.named_parameters())
    assert len(theirs) == len(given)
    with torch.no_grad():
        for name, p in given.items():
            theirs[_hf_name(name)].copy_(p)
    return model.train()


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


def _decay_groups(parameters):
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _adamw(parameters):
    o = OPTIMIZER
    return torch.optim.AdamW(
        _decay_groups(parameters), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True
    )


def _mean_loss(logits, labels):
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def masters_side(shape, mesh, compile, attention="sdpa"):
    """transformers in bf16, whole model and loss compiled as one graph, with fp32 masters beside
    it.
    """
    model = _transformers(shape, mesh.device, torch.float32, attention)
    copies = list(model.parameters())
    masters = [p.detach().clone() for p in copies]
    for m, p in zip(masters, copies, strict=True):
        m.grad, p.data = torch.zeros_like(m), p.data.bfloat16()
    optimizer, (tokens, labels) = _adamw(masters), _batch(shape, mesh.device)

    def loss_of(tokens, labels):
        return _mean_loss(model(tokens, use_cache=False).logits, labels)

    if compile:
        loss_of = torch.compile(loss_of)

    def step():
        loss = loss_of(tokens, labels)
        loss.backward()
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in copies])
        torch.nn.utils.clip_grad_norm_(masters, OPTIMIZER.clip)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, masters)
        for p in copies:
            p.grad = None
        return loss.detach()

    return step


def _plain_step(loss_of, tokens, labels, model, optimizer):
    def step():
        loss = loss_of(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def fsdp_side(shape, mesh, compile, attention="sdpa"):
    """transformers under FSDP2 mixed precision, compiled per layer; over tp with PyTorch's own
    parallelize_module.
    """
    model = _transformers(shape, mesh.device, torch.float32, attention)
    if mesh.tp.size > 1:
        _parallelize(model, mesh.grid["tp"])
    loss_of = _mean_loss
    if compile:
        for layer in model.model.layers:
            layer.compile()
        if mesh.tp.size == 1:
            loss_of = torch.compile(_mean_loss)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh.grid["fsdp"], mp_policy=policy, reshard_after_forward=False)
        if mesh.device.type == "cpu":
            module.set_force_sum_reduction_for_comms(True)
    optimizer, (tokens, labels) = _adamw(model.parameters()), _batch(shape, mesh.device)
    if mesh.tp.size == 1:
        return _plain_step(
            lambda t, l: loss_of(model(t, use_cache=False).logits, l),
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


SIDES = {
    1: {
        "dolmen": lambda s, m: dolmen_side(s, m, True),
        "dolmen eager": lambda s, m: dolmen_side(s, m, False),
        "transformers eager": lambda s, m: masters_side(s, m, False),
        "transformers compile": lambda s, m: masters_side(s, m, True),
        "transformers compile, eager attention": lambda s, m: masters_side(s, m, True, "eager"),
        "transformers compile FSDP2": lambda s, m: fsdp_side(s, m, True),
    },
    2: {
        "dolmen": lambda s, m: dolmen_side(s, m, True),
        "dolmen eager": lambda s, m: dolmen_side(s, m, False),
        "dolmen sequence parallel": lambda s, m: dolmen_side(s, m, True, True),
        "DTensor eager": lambda s, m: fsdp_side(s, m, False),
        "DTensor compile": lambda s, m: fsdp_side(s, m, True),
    },
}


def _time(step, device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    start, cpu = time.perf_counter(), time.process_time()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - cpu


def _section(rank, world, store, options):
    """One process of one section: build the sides, warm up, take turns, print."""
    warnings.filterwarnings("ignore")
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, options.threads // world))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.FileStore(store, world), rank=rank, world_size=world
    )
    mesh = meshes.grid(1, world, device)
    sides, losses = {}, {}
    for name, make in SIDES[world].items():
        if options.only and name not in options.only:
            continue
        start = time.perf_counter()
        sides[name] = make(options.shape, mesh)
        losses[name] = [float(sides[name]()) for _ in range(3)]
        shown = " ".join(f"{x:.4f}" for x in losses[name])
        if rank == 0:
            print(
                f"  built {name:40s} {time.perf_counter() - start:5.1f} s   losses {shown}",
                flush=True,
            )
    rounds = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, step in sides.items():
            dist.barrier()
            rounds[name].append(_time(step, device))
    if rank == 0:
        _print(options, world, device, rounds)
    dist.barrier()
    dist.destroy_process_group()


def _print(options, world, device, rounds):
    shape = options.shape
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{max(1, options.threads // world)} thread(s) each"
    )
    print(
        f"\n{world} process(es), {where}; torch {torch.__version__}; {options.rounds} rounds; "
        f"{shape}"
    )
    peak = next((p for name, p in PEAK.items() if name in where), None)
    ours = rounds.get("dolmen", next(iter(rounds.values())))
    for name, times in rounds.items():
        wall, cpu = (statistics.median(t[i] for t in times) for i in (0, 1))
        ratio, cpu_ratio = (
            statistics.median(t[i] / o[i] for t, o in zip(times, ours, strict=True)) for i in (0, 1)
        )
        rate = (
            f"MFU {shape.flops / wall / peak / world:5.1%}"
            if peak
            else f"{shape.flops / wall / 1e9:4.0f} GFLOP/s"
        )
        print(
            f"{name:40s} {wall * 1e3:6.0f} ms (min {min(times)[0] * 1e3:5.0f}, CPU "
            f"{cpu * 1e3:5.0f}) {shape.tokens / wall:7.0f} tokens/s  {rate}  "
            f"dolmen {ratio:.2f}x (CPU time {cpu_ratio:.2f}x)",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    parser.add_argument(
        "--tp",
        type=int,
        nargs="+",
        help="sections to run; default: 1, and 2 where there are two devices",
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="CPU threads of all processes together"
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each side")
    parser.add_argument("--only", nargs="+", help="sides to run, by name")
    parser.add_argument("--batch", type=int, help="sequences per step")
    options = parser.parse_args()
    options.shape = SHAPES[options.device]
    if options.batch:
        options.shape = replace(options.shape, batch=options.batch)
    for world in options.tp or (
        [1, 2] if options.device == "cpu" or torch.cuda.device_count() > 1 else [1]
    ):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_section, (world, f"{folder}/store", options), nprocs=world)


if __name__ == "__main__":
    main()
