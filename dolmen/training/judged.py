"""What a run is judged by while it trains, beside its loss: scores of tasks, and what it writes
after a few prompts. Numbers join the rows of metrics.jsonl, texts samples.jsonl:

    {"step": 100, "prompt": "def main(", "text": "argv):\\n    ...", "tokens": 4096, "time": 1.7e9}

Every rank takes part, under any layout; nothing that the run draws or trains is touched. What a
layout shares that no text is written by (sequences over cp, several stages per rank) is put into
one that writes (rl/generation.py), for the moment.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dolmen.core.mesh import Mesh
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.evaluation import tasks, texts
from dolmen.evaluation.perplexity import Loaded
from dolmen.files import gate, write
from dolmen.optim.optimizer import DTYPES
from dolmen.rl.generation import GenerationModel
from dolmen.serving.generation import encode
from dolmen.serving.sampling_params import SamplingParams
from dolmen.training import folder
from dolmen.training.config import RunConfig
from dolmen.training.start import first_does
from dolmen.training.state import TrainState

NAME = "samples.jsonl"
LARGEST = 2**20  # bytes of a file of prompts


class Judged:
    """Of one run."""

    def __init__(self, run: RunConfig, tokenizer: PreTrainedTokenizer, mesh: Mesh, out: Path):
        self.asked, self.tokenizer, self.mesh = run.evaluate, tokenizer, mesh
        self.prompts: list[str] = []
        self.file = None
        if self.asked.samples is not None:
            file = self.asked.samples
            self.prompts = first_does(mesh, lambda: read_prompts(file))
            if mesh.first:
                folder.claim(out, NAME)
                self.file = write.append(out / NAME)
        self.drawing = _drawing(run, mesh)
        self.begun = [encode(tokenizer, prompt, run.known_model) for prompt in self.prompts]

    def scores(self, state: TrainState) -> dict[str, float]:
        """`tasks/TASK/METRIC` -> number, the same on every rank."""
        if not self.asked.names:
            return {}
        with self._loaded(state) as loaded:
            found = tasks.scores(loaded, self.tokenizer, self.asked)
        return {
            f"tasks/{task}/{name.removesuffix(',none')}": value
            for task, numbers in found.items()
            for name, value in numbers.items()
        }

    def samples(self, state: TrainState) -> list[str]:
        """What follows each prompt, which is written too."""
        if not self.begun:
            return []
        asked = self.asked
        options = SamplingParams(
            asked.temperature,
            max_new_tokens=asked.max_new_tokens,
            stop=() if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,),
        )
        with self._loaded(state) as loaded:
            found = texts.continued(loaded, self.tokenizer, self.begun, options, seed=asked.seed)
        if self.file is not None:
            told = {"tokens": state.tokens, "time": time.time()}
            for prompt, text in zip(self.prompts, found, strict=True):
                row = {"step": state.step, "prompt": prompt, "text": text, **told}
                self.file.write(json.dumps(row) + "\n")
        return found

    @contextmanager
    def _loaded(self, state: TrainState) -> Iterator[Loaded]:
        """The model that is trained, where it lies; or its values, where it writes."""
        if self.drawing is None:
            yield Loaded(state.model, self.mesh, state.schedule)
            return
        drawing = self.drawing
        try:
            yield Loaded(drawing.load_weights(state.model), drawing.mesh, drawing.schedule)
        finally:
            drawing.release()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _drawing(run: RunConfig, mesh: Mesh) -> GenerationModel | None:
    """In tp and pp of training, with one stage per rank, and all of a text on each rank; None where
    training's own layout is that.
    """
    layout = run.layout
    if layout.virtual_stages == 1 and layout.cp == 1:
        return None
    training = replace(run.training, dropout=0.0, fp8=None)
    dtype = DTYPES[run.train.dtype]
    return GenerationModel(run.tree, training, mesh, layout.tp, dtype, layout.pp, released=True)


def read_prompts(file: str) -> list[str]:
    """One per line; empty lines are none. Raises ValueError for a file that has none."""
    prompts = [line for line in gate.read_text(file, LARGEST).splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"--evaluate.samples {file}: no line has a prompt")
    return prompts
