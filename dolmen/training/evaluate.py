"""Validation and evaluation of a run while it trains:

    Validator        loss on the validation split, of all text and per source      metrics.jsonl
    Calibration      of a reward model, how confident it is and how often right    calibration.png
    RunEvaluator     task scores, and samples after a few prompts                  samples.jsonl

    {"step": 100, "prompt": "def main(", "text": "argv):\n    ...", "tokens": 4096, "time": 1.7e9}

Every rank takes part, in any layout; neither the random numbers nor the parameters of training are
touched, so a run with evaluation has the losses of one without, to the bit. A layout that cannot
generate (sequences split over cp, several stages per rank) lends its weights to a model that can
(rl/generation.py) for the time of the evaluation.

Per source, losses are also given in bits per byte, as tokenizers split text differently, and beside
what they were before the first step: what an old language loses while a new one is learned.

Calibration compares confidence, sigmoid(|difference of scores|), with accuracy, in bins of
validation pairs (Guo et al., 1706.04599):

    right  1.0 |            /o      o    each mark is a bin, as large as the number of its pairs
           0.8 |       o /           /    diagonal: right as often as confident
           0.5 | o /_____________
               0.5          1.0  confident
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dolmen.checkpoint.saved import Validation
from dolmen.core.mesh import Mesh
from dolmen.data.base_loader import HeldOutRows, Loader
from dolmen.data.batch import Batch
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.evaluation import tasks
from dolmen.evaluation.config import DuringConfig
from dolmen.evaluation.model import Loaded, generate_texts
from dolmen.evaluation.validate import NEXT_TOKEN, mean_loss
from dolmen.families import ModelConfig
from dolmen.files import gate, write
from dolmen.launch.watchdog import Watch
from dolmen.objectives.objective import CrossEntropy, MaskedLM, Objective
from dolmen.objectives.preference import meaningful_metrics
from dolmen.objectives.reward import BINS, CalibratedRewardLoss, PairwiseRewardLoss
from dolmen.pages import picture
from dolmen.rl.generation import GenerationModel
from dolmen.serving.generation import encode
from dolmen.serving.request import SamplingParams
from dolmen.training import folder
from dolmen.training.config import LogConfig
from dolmen.training.start import on_first_rank
from dolmen.training.state import TrainState

SAMPLES = "samples.jsonl"
LARGEST = 2**20  # bytes of a file of prompts


class RunEvaluator:
    """Task scores (lm-evaluation-harness) and sample continuations of a run while it trains. Its
    methods are called by every rank; the first rank opens and writes samples.jsonl.
    """

    def __init__(
        self,
        config: DuringConfig,
        model: ModelConfig,
        tokenizer: PreTrainedTokenizer,
        generator: GenerationModel | None,
        mesh: Mesh,
        out: Path,
    ):
        """Read and tokenize the prompts of --evaluate.samples, and open samples.jsonl in `out`
        (first rank). `generator`: the model that generates, its memory released between
        evaluations; None where the trained one can. Collective.
        """
        self.config, self.tokenizer, self.mesh = config, tokenizer, mesh
        self.prompts: list[str] = []
        self.file = None
        if self.config.samples is not None:
            file = self.config.samples
            self.prompts = on_first_rank(mesh, lambda: read_prompts(file))
            if mesh.first:
                folder.claim(out, SAMPLES)
                self.file = write.append(out / SAMPLES)
        self.generator = generator
        self.prompt_tokens = [encode(tokenizer, prompt, model) for prompt in self.prompts]

    def scores(self, state: TrainState) -> dict[str, float]:
        """Run the lm_eval tasks of --evaluate.tasks on the model of `state`, and return
        {"tasks/TASK/METRIC": value}, the same on every rank; {} without tasks. The suffix ",none"
        of lm_eval's metrics is dropped. Collective.
        """
        if not self.config.names:
            return {}
        with self._generating_model(state) as loaded:
            result = tasks.scores(loaded, self.tokenizer, self.config)
        return {
            f"tasks/{task}/{name.removesuffix(',none')}": value
            for task, numbers in result.items()
            for name, value in numbers.items()
        }

    def samples(self, state: TrainState) -> list[str]:
        """Generate a continuation of each prompt of --evaluate.samples with the model of `state`,
        append a row for each to samples.jsonl (first rank), and return the texts; [] without
        prompts. Collective.
        """
        if not self.prompt_tokens:
            return []
        config = self.config
        options = SamplingParams(
            config.temperature,
            max_new_tokens=config.max_new_tokens,
            stop=() if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,),
        )
        with self._generating_model(state) as loaded:
            result = generate_texts(
                loaded, self.tokenizer, self.prompt_tokens, options, seed=config.seed
            )
        if self.file is not None:
            position = {"tokens": state.tokens, "time": time.time()}
            for prompt, text in zip(self.prompts, result, strict=True):
                row = {"step": state.step, "prompt": prompt, "text": text, **position}
                self.file.write(json.dumps(row) + "\n")
        return result

    @contextmanager
    def _generating_model(self, state: TrainState) -> Iterator[Loaded]:
        """Context manager: yield the trained model itself where its layout can generate, else a
        copy of its current weights in one that can, whose memory is released at the end.
        """
        if self.generator is None:
            yield Loaded(state.model, self.mesh, state.schedule)
            return
        generator = self.generator
        try:
            yield Loaded(generator.load_weights(state.model), generator.mesh, generator.schedule)
        finally:
            generator.release()

    def close(self) -> None:
        """Close samples.jsonl, if this rank has opened it."""
        if self.file is not None:
            self.file.close()


def read_prompts(file: str) -> list[str]:
    """Return the prompts in the file of --evaluate.samples, its lines that are not blank. Raises
    ValueError if there is none, or the file cannot be read or exceeds 1 MiB.
    """
    prompts = [line for line in gate.read_text(file, LARGEST).splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"--evaluate.samples {file}: no line has a prompt")
    return prompts


CALIBRATION_FILE = "calibration.png"


@dataclass(frozen=True)
class Calibration:
    """Calibration of a reward model in BINS equal bins of confidence, from 1 / 2 to 1. Values are
    shares of all validation pairs.
    """

    confident: tuple[float, ...]
    """Share of all pairs in each bin."""
    right: tuple[float, ...]
    """Share of all pairs in each bin and ranked correctly."""

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> "Calibration":
        """Return the calibration from the metrics "sure I" and "right I" of each bin I, which
        CalibratedRewardLoss computes: the share of pairs in the bin, and of those ranked correctly.
        """
        confident, right = (
            [metrics[f"{name} {i}"] for i in range(BINS)] for name in ("sure", "right")
        )
        return cls(tuple(confident), tuple(right))

    @property
    def error(self) -> float:
        """Expected calibration error: the mean over all pairs of |accuracy in the pair's bin of
        confidence - confidence in the middle of the bin|.
        """
        return sum(
            abs(right - confident * bin_middle(i))
            for i, (confident, right) in enumerate(zip(self.confident, self.right, strict=True))
        )


def bin_middle(index: int) -> float:
    """Return the confidence in the middle of bin `index` of BINS, which divide [1 / 2, 1]
    evenly.
    """
    return 0.5 + (index + 0.5) / (2 * BINS)


def without_bins(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a copy of the metrics without those of the calibration bins ("sure I" and "right I" of
    bin I), which only the calibration diagram needs.
    """
    return {n: value for n, value in metrics.items() if not n.startswith(("sure ", "right "))}


def plot_calibration(calibration: Calibration, accuracy: float, title: str) -> bytes:
    """Return the calibration diagram as a PNG: accuracy over confidence, a mark for each bin that
    is not empty, its area growing with the bin's share of pairs. `accuracy` is that of all pairs,
    for the title.
    """
    return picture.draw(_paint_calibration, calibration, accuracy, title, kind="png")


def _paint_calibration(figure: Any, calibration: Calibration, accuracy: float, title: str) -> None:
    """Draw the calibration diagram on a matplotlib figure."""
    figure.set_size_inches(5.2, 5)
    axis = figure.subplots()
    # perfect calibration: right as often as confident
    axis.plot([0.5, 1], [0.5, 1], color=picture.GREEN, linestyle="--", linewidth=1)
    bins = [i for i, share in enumerate(calibration.confident) if share > 0]
    axis.scatter(
        [bin_middle(i) for i in bins],
        [calibration.right[i] / calibration.confident[i] for i in bins],
        s=[30 + 600 * calibration.confident[i] for i in bins],
        color=picture.BLUE,
        alpha=0.75,
    )
    axis.set(
        xlabel="confidence in the preferred completion",
        ylabel="accuracy",
        xlim=(0.48, 1.02),
        ylim=(-0.03, 1.03),
        title=f"{title}\naccuracy {accuracy:.3f}, calibration error {calibration.error:.3f}",
    )
    axis.grid()


@dataclass(frozen=True)
class SourceValidation:
    """Validation results of each data source, by its name."""

    losses: dict[str, float] = field(default_factory=dict)
    """Nats per predicted token."""
    per_byte: dict[str, float] = field(default_factory=dict)
    """Bits per byte, of sources whose size in bytes is known."""
    before: dict[str, float] = field(default_factory=dict)
    """Bits per byte before the first step."""

    def row(self) -> dict[str, float]:
        """Return the results as entries of a row of metrics.jsonl: val_loss/SOURCE in nats per
        token, and val_bits_per_byte/SOURCE where known.
        """
        losses = {f"val_loss/{name}": value for name, value in self.losses.items()}
        return losses | {
            f"val_bits_per_byte/{name}": value for name, value in self.per_byte.items()
        }

    def lines(self) -> list[str]:
        """Return a line of text about each source's validation loss, for the console."""
        return [
            describe_source(name, loss, self.per_byte.get(name), self.before.get(name))
            for name, loss in self.losses.items()
        ]


def describe_source(name: str, loss: float, per_byte: float | None, before: float | None) -> str:
    """Return a line of text about a source's validation: `loss` in nats per token, `per_byte` in
    bits per byte and `before`, the same before the first step. What is None or has not changed is
    left out.
    """
    line = f"{loss:.4f} on {name}"
    if per_byte is not None:
        line += f", {per_byte:.4f} bits per byte"
        line += "" if before in (None, per_byte) else f" (before the first step {before:.4f})"
    return line


def validate_sources(
    state: TrainState,
    loader: Loader,
    mesh: Mesh,
    most: int | None,
    before: Mapping[str, float],
    through: Callable[[Iterable[Batch]], Iterable[Batch]],
) -> SourceValidation:
    """Compute the validation loss of the model on each data source that has a validation split,
    over at most `most` windows (sequences; None: all), and bits per byte except for masked LM, and
    return them by source.

    `before` has the bits per byte from before the first step, by source; the result carries them
    on, and a validation at step 0 returns its own in their place. `through` wraps the iteration
    over batches (progress for the watchdog). Every rank calls it.
    """
    losses, sources = {}, loader.validation_by_source
    for name, rows in sources.items():
        batches = loader.validation_batches(most, mesh.dp.rank, mesh.dp.size, rows)
        losses[name] = mean_loss(state.model, through(batches), mesh, state.schedule).loss
    # masked LM predicts only some of the tokens, so its bytes are not all predicted
    per_byte = bits_per_byte(losses, sources) if loader.cloze is None else {}
    result = SourceValidation(losses, per_byte, dict(before))
    return result if state.step else replace(result, before=per_byte)


def bits_per_byte(losses: Mapping[str, float], rows: Mapping[str, HeldOutRows]) -> dict[str, float]:
    """Return source -> its loss in bits per byte, for sources whose size in bytes is known: the
    loss in nats per token times tokens per byte / ln 2. Tokens per byte are those of the source's
    whole validation split in `rows`, so the result is exact where all of it was read.
    """
    return {
        name: loss * rows[name].tokens / size / math.log(2)
        for name, loss in losses.items()
        if (size := rows[name].bytes)
    }


Through = Callable[[Iterable[Batch]], Iterable[Batch]]


class Validator:
    """Validates a run: loss, metrics, losses per source, calibration.

    `last` is the result of the last validation, `last_finite` that of the last one with a finite
    loss, which checkpoints store. Both carry the losses per source from before the first step.
    """

    def __init__(
        self,
        config: LogConfig,
        sequence_length: int,
        title: str,
        loader: Loader,
        mesh: Mesh,
        out: Path,
        watch: Watch,
    ):
        """Prepare validations of the run in the folder `out`, whose progress `watch` gets. `title`:
        of the calibration diagram.
        """
        self.config, self.sequence_length, self.title = config, sequence_length, title
        self.loader, self.mesh, self.out, self.watch = loader, mesh, out, watch
        self.last: Validation | None = None
        self.last_finite: Validation | None = None

    def begin(self, saved: Validation | None) -> None:
        """Take the validation stored in the checkpoint that the run resumes from (None: none) as
        the last one, and as the last one with a finite loss.
        """
        self.last = self.last_finite = saved

    def measure(self, state: TrainState) -> tuple[dict[str, Any], list[str]]:
        """Validate the model. Return a row of metrics.jsonl and the lines of text to print: total,
        then one per source. Every rank calls it.

        Side effects: sets `last`, and `last_finite` if the loss is finite; a reward model's
        calibration.png is written. Metrics that mean nothing yet (before the first update) are left
        out, and bits per byte are known only where the whole validation split was read.
        """
        most = self.most(state)
        # `through` reports progress to the watchdog; the first one may compile
        through = partial(self.watch.through, phase="validate", patient=not state.step)
        batches = self.loader.validation_batches(most, self.mesh.dp.rank, self.mesh.dp.size)
        objective = validation_objective(state.objective)
        result = mean_loss(state.model, through(batches), self.mesh, state.schedule, objective)
        # 20 numbers that only the diagram shows
        metrics_ = without_bins(result.metrics)
        if len(metrics_) < len(result.metrics):
            metrics_["calibration_error"] = self._write_calibration(result.metrics)
        # without an update policy and reference are one model: margins are 0, accuracies are chance
        for name in {*objective.names} - {*meaningful_metrics(objective, state.updates)}:
            del metrics_[name]
        loss, tokens = result.loss, result.tokens
        per_source = self._validate_sources(state, most, through)
        held_out = self.loader.validation_tokens
        size = self.loader.validation_bytes
        bits = result.bits_per_byte(size) if tokens == held_out and size is not None else None
        # bits per byte divide by the bytes of the whole split, so a part of its tokens gives none
        self.last = Validation(
            state.step,
            loss,
            tokens,
            held_out,
            bits,
            per_source.losses,
            per_source.per_byte,
            per_source.before,
        )
        if math.isfinite(loss):
            self.last_finite = self.last
        row = {
            "step": state.step,
            "val_loss": loss,
            "val_tokens": tokens,
            "tokens": state.tokens,
            **per_source.row(),
            **{f"val_{name}": value for name, value in metrics_.items()},
        }
        part = "" if tokens == held_out else f" of {held_out:,}"
        why = ""
        if part and state.step == state.steps and self.loader.cloze is None:
            why = "; limited in a short run, --log.validation-tokens 0 reads all"
        more = "".join(f", {name} {value:.4f}" for name, value in metrics_.items())
        first = (
            f"step {state.step}: validation loss {loss:.4f}{more} on {tokens:,}{part} "
            f"{self.loader.unit}s{why}"
        )
        return row, [first, *(f"  {line}" for line in per_source.lines())]

    def most(self, state: TrainState) -> int | None:
        """Return the largest number of windows that the validation at this step reads; None: all.
        Usually --log.validation-tokens (0: all). The validation after the last step reads at least
        as many tokens as the run has trained on, and the one before the first step as many as the
        last one will, so that the two can be compared.
        """
        tokens, length = self.config.validation_tokens, self.sequence_length
        if tokens == 0:
            return None
        if state.step in (0, state.steps):
            trained = state.tokens if state.step else self.loader.first(state.steps) * length
            # rounded up: at least so many tokens
            return -(-max(tokens, trained) // length)
        return max(1, tokens // length)

    def _validate_sources(
        self, state: TrainState, most: int | None, through: Through
    ) -> SourceValidation:
        """Return the validation per source, with the bits per byte from before the first step taken
        from the last validation; empty without --log.validate-sources.
        """
        if not self.config.validate_sources:
            return SourceValidation()
        before = {} if self.last is None else self.last.sources_before
        return validate_sources(state, self.loader, self.mesh, most, before, through)

    def _write_calibration(self, result: Mapping[str, float]) -> float:
        """Write calibration.png, the calibration diagram of a reward model, from the metrics of a
        validation (first rank), and return the expected calibration error.
        """
        calibration = Calibration.from_metrics(result)
        if self.mesh.first:
            folder.claim(self.out, CALIBRATION_FILE)
            image = plot_calibration(calibration, result["accuracy"], self.title)
            write.replace(self.out / CALIBRATION_FILE, image)
        return calibration.error


def validation_objective(objective: Objective) -> Objective:
    """Return the objective that validation computes for a training objective: plain cross-entropy
    per token for language models and encoders; the same loss with metrics of calibration for reward
    models; else the training objective itself.
    """
    match objective:
        case PairwiseRewardLoss():
            return CalibratedRewardLoss(objective.center, objective.margin)
        case CrossEntropy() | MaskedLM():
            return NEXT_TOKEN
    return objective
