"""Loads a model to evaluate it, and generates with it: completions for tasks and samples."""

from collections.abc import Sequence
from dataclasses import dataclass

from dolmen.conversion.source import ModelSource, tokenizer_folder
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.data.tokenizer import PreTrainedTokenizer, check_vocabulary, load_tokenizer
from dolmen.evaluation.config import EvaluateConfig
from dolmen.model import spec
from dolmen.model.decoder import Decoder
from dolmen.objectives.objective import check_head
from dolmen.optim.optimizer import DTYPES
from dolmen.parallel import pipeline
from dolmen.parallel.inference_linear import Weights
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import make_schedule
from dolmen.serving import engine
from dolmen.serving.engine import Engine, require_finite
from dolmen.serving.generation import Detokenizer
from dolmen.serving.request import Request, SamplingParams


@dataclass(frozen=True)
class Loaded:
    """A loaded model, the mesh that it is sharded over, and the pipeline schedule (None for one
    stage).
    """

    model: Decoder
    mesh: Mesh
    schedule: Schedule | None


def check_predicts_next_token(model: spec.ModelSpec) -> None:
    """Raise ValueError for a model that does not predict a next token: without an LM head, or
    bidirectional.
    """
    check_head("a loss of the next token", spec.LMHeadSpec, model)
    if model.both_ways:
        raise ValueError(
            "the model is a bidirectional encoder (masked language model), which has no "
            "next-token probabilities to evaluate: use dolmen verify"
        )


def load(
    source: ModelSource,
    mesh: Mesh = SINGLE,
    dtype: str | None = None,
    weights: Weights = "stated",
) -> Loaded:
    """Load the model of `source`, sharded over `mesh`, for evaluation and generation, in `dtype` or
    its own, with its linear `weights` as stored or quantised to int8. Collective. Raises ValueError
    for a source that cannot be loaded or a model that does not predict a next token.
    """
    check_predicts_next_token(source.spec)
    schedule = None
    # generation and evaluation run the forwards of a 1f1b schedule
    if mesh.pp.size > 1:
        schedule = make_schedule("1f1b", mesh.pp.size, mesh.pp.size)
        pipeline.connect(schedule, mesh)
    compute = DTYPES[dtype] if dtype else None
    model = engine.load_decoder(source, mesh, compute, schedule, weights)
    return Loaded(model, mesh, schedule)


def tokenizer_of(config: EvaluateConfig, source: ModelSource) -> PreTrainedTokenizer:
    """Return the tokenizer of --data.tokenizer, or the model's own. Raises ValueError where there
    is none, or it has more tokens than the model.
    """
    named = config.data.tokenizer
    option = "" if named is None else "--data.tokenizer"
    tokenizer = load_tokenizer(named or tokenizer_folder(source), option=option)
    check_vocabulary(tokenizer, source.spec.vocab_size, trained=True)
    return tokenizer


def generate_texts(
    loaded: Loaded,
    tokenizer: PreTrainedTokenizer,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    until: Sequence[str] = (),
    seed: int = 0,
) -> list[str]:
    """Generate the completion of each prompt (token ids) as text, ending before the first stop
    string of `until`. Collective; all ranks return all texts. Raises ValueError for prompts that
    the model cannot take.
    """
    texts = [Detokenizer(tokenizer, until) for _ in prompts]
    weights = loaded.model.packed_only or "stated"
    with Engine(loaded.model, mesh=loaded.mesh, weights=weights) as engine:
        for number, prompt in enumerate(prompts):
            engine.add(Request(prompt, sampling, id=number, seed=seed))
        while engine.busy:
            output = engine.step()
            require_finite(output.finished)
            for chosen in output.new_tokens:
                text = texts[chosen.number]
                text.add(chosen.token)
                if text.stopped is not None:
                    # a stop string was found: free its KV cache
                    engine.cancel(chosen.number)
    for text in texts:
        text.end()
    return [text.whole for text in texts]
