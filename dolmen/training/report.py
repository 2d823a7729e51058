"""Console output of a run: the header before the first step, and the progress line (a live line on
a terminal, else a plain line per logged step).
"""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dolmen.core import device as devices
from dolmen.core import state
from dolmen.core.log import duration, gib, size
from dolmen.core.mesh import Mesh
from dolmen.core.messages import plural
from dolmen.data.base_loader import Loader
from dolmen.model import count
from dolmen.model.layout import Layout
from dolmen.optim.optimizer import master_dtype
from dolmen.parallel.simulation import simulate
from dolmen.training.config import RunConfig
from dolmen.training.mfu import Peak
from dolmen.training.state import TrainState

SHOWN = {
    "rollout/reward": "reward {:.3f}",
    "rollout/reference_kl": "KL {:.4f} per token",
    "objective/accuracy": "pair accuracy {:.1%}",
    "rewards/accuracies": "pair accuracy {:.1%}",
    "router/max_load": "max load {:.2f}",
}
"""Metrics that the progress line shows after the loss, where a row has them."""


def header(
    run: RunConfig, state_: TrainState, loader: Loader, mesh: Mesh, peak: Peak, out: str
) -> str:
    """Return the text that describes the run before its first step: eight lines, and one for each
    change made to the data. `--log.verbose` adds kernels, peak FLOP/s, MFU and reproducibility.
    """
    data, dtype = loader.description, run.train.dtype
    precision = "" if run.training.fp8 is None else f", {run.training.fp8.precision}"
    device = devices.describe_device(mesh.device, run.train.device)
    tokens = run.train.global_batch_size * run.sequence_length
    rows = [
        ("model", _model(run)),
        ("start", _start(run, state_)),
        (
            "layout",
            f"{_layout(run.layout, state_)}: {plural(mesh.size, 'process', 'processes')} on "
            f"{device}, {gib(_bytes_at_rest(state_))} of weights and optimizer state each",
        ),
        ("data", data.training),
        *(("", change) for change in data.changes),
        ("validation", data.validation),
        (
            "batch",
            f"{plural(run.train.global_batch_size, 'sequence')} of {run.sequence_length} = "
            f"{tokens:,} tokens; {run.microbatch_size} at once per process",
        ),
        (
            "run",
            f"{describe_length(state_, loader, tokens)}, {dtype}{precision}, "
            f"lr {run.optimizer.lr:g} ({run.optimizer.schedule}, {describe_warmup(run)} warm-up)",
        ),
        ("out", out),
    ]
    if run.log.verbose:
        rows += _details(run, state_, loader, mesh, peak)
    return "\n".join(f"{name:<11}{text}" for name, text in rows)


def _model(run: RunConfig) -> str:
    """Return the header's text about the model: family, parameters, layers, hidden size, attention,
    vocabulary, and with LoRA the share that is trained.
    """
    spec = run.spec
    trained = ""
    if run.training.adapter is not None:
        trainable, total = count.trainable_parameters(run.trained), count.parameters(run.trained)
        trained = (
            f" (LoRA rank {run.adapter.rank} trains {size(trainable)}, {trainable / total:.2%})"
        )
    return (
        f"{run.known_model.model_type}, {size(count.parameters(spec))} parameters{trained}: "
        f"{plural(spec.layers, 'layer')}, hidden {spec.hidden_size}, "
        f"{spec.blocks[0].mixer.words}, vocabulary {spec.vocab_size:,}"
        f"{', tied' if spec.head.tied else ''}"
    )


def _start(run: RunConfig, state_: TrainState) -> str:
    """Return the header's text about where the weights come from (--init, random, or a checkpoint),
    and until which step only rows of new tokens are trained, if there is such a phase.
    """
    start = run.init or f"random weights, seed {run.train.seed}"
    if state_.step:
        start = f"checkpoint of step {state_.step}"
    if (rows := state_.new_rows) is not None:
        start += (
            f"; only embedding rows from token id {rows.first} on are trained until step "
            f"{rows.until}"
        )
    return start


def _bytes_at_rest(state_: TrainState) -> int:
    """Return the bytes of weights, optimizer moments and fp8 scales that this rank holds between
    steps.
    """
    tensors = state_.tensors().values()
    return sum(state.local_elements(t) * t.element_size() for t in tensors)


def _details(
    run: RunConfig, state_: TrainState, loader: Loader, mesh: Mesh, peak: Peak
) -> list[tuple[str, str]]:
    """Return the rows (title, text) that --log.verbose adds to the header: kernels, data, peak
    FLOP/s, MFU, fp8, adapters and reproducibility, where they apply.
    """
    kernels = state_.model.split.kernels.describe(experts=run.spec.experts > 0)
    rows = [
        ("kernels", kernels),
        *(("data" if i == 0 else "", line) for i, line in enumerate(loader.description.details)),
        ("peak", str(peak)),
        ("MFU", describe_mfu(run)),
    ]
    if run.training.fp8 is not None:
        calibrated = any(delayed.initialized for delayed in state_.model.delayed_scaling().values())
        scales = "; fp8 scales of --init" if calibrated and not state_.step else ""
        rows.append(("fp8", f"{run.training.fp8}; {describe_fp8(run)}{scales}"))
    if run.training.adapter is not None:
        rows.append(("adapters", describe_adapters(run)))
    if reproducible := describe_reproducibility(run, mesh):
        rows.append(("bits", reproducible))
    return rows


def describe_length(state_: TrainState, loader: Loader, tokens: int) -> str:
    """Return a text about the remaining steps: first and last, their tokens (`tokens` per step),
    and their epochs, a range if data sources are read at different rates.
    """
    left = size(float(tokens) * (state_.steps - state_.step))
    before, after = loader.epochs(state_.step), loader.epochs(state_.steps)
    # sources of a mixture are read at different rates
    passes = sorted(after[name] - before[name] for name in after)
    several = f"{passes[0]:.3g} to " if f"{passes[0]:.3g}" != f"{passes[-1]:.3g}" else ""
    return f"steps {state_.step} to {state_.steps}, {left} tokens, {several}{passes[-1]:.3g} epochs"


def describe_warmup(run: RunConfig) -> str:
    """Return the steps of the learning-rate warm-up as text, followed by its tokens if it is
    configured in tokens.
    """
    tokens = run.optimizer.warmup_tokens
    return f"{run.warmup_steps:g}" + ("" if tokens is None else f" ({size(tokens)} tokens)")


def describe_fp8(run: RunConfig) -> str:
    """Return a text about the share of the model's matrix multiply-adds that is computed in eight
    bits, and the dtype of the rest.
    """
    params = run.trained.params.values()
    rounded = sum(param.products for param in params if param.fp8 is not None)
    total = sum(param.products for param in params)
    share = f"{rounded / total:.0%} of its matrix multiply-adds"
    return f"{share}, the rest in {run.train.dtype}"


def describe_adapters(run: RunConfig) -> str:
    """Return a text about the LoRA adapters: rank, alpha, targets, share of trained parameters, and
    the memory that int8 storage of frozen weights saves, if used.
    """
    trained, total = count.trainable_parameters(run.trained), count.parameters(run.trained)
    where = ", ".join(run.adapter.targets)
    return (
        f"rank {run.adapter.rank}, alpha {run.adapter.alpha:g}, on {where}: {size(trained)} of "
        f"{size(total)} parameters are trained ({trained / total:.2%})" + describe_int8(run)
    )


def describe_int8(run: RunConfig) -> str:
    """Return a text about the memory of frozen weights that are stored in int8, of the whole model:
    unquantized, and quantized with scales; "" without any.
    """
    params = run.trained.params.values()
    wide = master_dtype(run.train.dtype).itemsize
    was = sum(param.elements for param in params if param.int8) * wide
    if not was:
        return ""
    now = was // wide + sum(param.elements for param in params if param.role == "scale") * wide
    return f"; {size(was, 'B')} of the frozen ones are stored in int8 ({size(now, 'B')})"


def describe_mfu(run: RunConfig) -> str:
    """Return a text about the FLOP per token by which MFU is computed, which counts only the keys
    that queries attend to, compared with counting all keys, as other programs do.
    """
    ours = count.training_flops_per_token(run.trained, run.sequence_length)
    full = count.training_flops_per_token(run.trained, run.sequence_length, "full")
    return (
        f"of {ours / 1e9:.4g} GFLOP per token, attention to the keys that queries see; with all "
        f"keys, as torchtitan counts, {full / 1e9:.4g}: {full / ours:.3f} times the MFU"
    )


def describe_reproducibility(run: RunConfig, mesh: Mesh) -> str | None:
    """Return a text on whether the run, on GPUs, is reproducible bit for bit; None on a CPU, where
    it always is.
    """
    if mesh.device.type != "cuda":
        return None
    if run.train.deterministic:
        return "bitwise reproducible, also after a resume, with this layout on these GPUs"
    return "not reproducible bit for bit; --train.deterministic makes them so, and is slower"


def _layout(layout: Layout, state_: TrainState) -> str:
    """Return a text about the parallel layout, such as "tp 2 x dp 4, ZeRO 1": sizes of the axes,
    the pipeline's schedule with its predicted bubble, ZeRO stage, recomputation, and the order of
    sums.
    """
    words = [
        f"tp {layout.tp}"
        + (", sequence parallel" if layout.sequence_parallel and layout.tp > 1 else "")
    ]
    if layout.cp > 1:
        words.append(f"cp {layout.cp} ({layout.context})")
    if layout.pp > 1:
        bubble = f"bubble {simulate(state_.schedule).bubble:.0%}"
        words.append(
            f"pp {layout.pp} ({state_.schedule.name}, "
            f"{plural(state_.schedule.micros, 'microbatch', 'microbatches')}, {bubble})"
        )
    words.append(
        f"dp {layout.dp}" + (f", ep {layout.ep}" if layout.ep > 1 else "") + f", ZeRO {layout.zero}"
    )
    of = (
        ""
        if layout.recompute_layers is None
        else f" ({plural(layout.recompute_layers, 'layer')} per stage)"
    )
    return (
        " x ".join(words)
        + (f"; recompute {layout.recompute}{of}" if layout.recompute != "none" else "")
        + ("; sums in fixed order" if layout.reduction == "fixed" else "")
    )


class ProgressLine:
    """The progress of a run: one live line on a terminal, else a plain line per logged step, with
    step, loss, tokens/s, MFU, memory and remaining time.
    """

    def __init__(self, console: Console, step: int, steps: int):
        """Start the live line if `console` is a terminal. `step`: steps made so far, of `steps`."""
        self.console, self.start, self.steps, self.began = console, step, steps, time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
        )
        self.progress = (
            Progress(*columns, console=console, transient=True, expand=True)
            if console.is_terminal
            else None
        )
        if self.progress:
            self.progress.start()
            self.task = self.progress.add_task("starting", total=steps, completed=step, numbers="")

    def show(self, row: dict) -> None:
        """Show a row of metrics.jsonl: update the live line on a terminal, else print a line. The
        remaining time is estimated from the pace since this start of the run.
        """
        done = row["step"] - self.start
        # pace of this start, validations and saves included
        left = (time.monotonic() - self.began) / max(1, done) * (self.steps - row["step"])
        numbers = (
            f"loss {row['loss']:.4f}  {size(row['tokens_per_second'])} tok/s  {_mfu(row)} "
            f" {row['memory_gib']:.2f} GiB  {duration(left)} left"
        )
        numbers += "".join("  " + form.format(row[n]) for n, form in SHOWN.items() if n in row)
        if self.progress:
            self.progress.update(
                self.task,
                completed=row["step"],
                description=f"step {row['step']}/{self.steps}",
                numbers=numbers,
            )
        else:
            self.console.print(
                f"step {row['step']}/{self.steps}  {numbers}  lr {row['lr']:.2e}  grad norm "
                f"{row['grad_norm']:.3f}"
            )

    def say(self, text: str) -> None:
        """Print a line of text that stays above the progress line."""
        self.console.print(text)

    def close(self) -> None:
        """Remove the live line, on a terminal."""
        if self.progress:
            self.progress.stop()


def _mfu(row: dict) -> str:
    """Return the MFU in a row of metrics.jsonl as text: relative to the datasheet's peak, if known,
    and to the measured peak.
    """
    measured = f"{row['mfu_measured']:.1%} of measured peak"
    if row["mfu_measured"] > 1:
        measured += " (which was measured on a busy device)"
    if "mfu_datasheet" in row:
        return f"MFU {row['mfu_datasheet']:.1%} of datasheet peak, {measured}"
    return f"MFU {measured}"
