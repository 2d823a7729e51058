"""Texts that a model writes while it is measured: answers to tasks, and samples of a run."""

from collections.abc import Sequence

from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.evaluation.perplexity import Loaded
from dolmen.serving.engine import Engine, require_finite
from dolmen.serving.generation import Detokenizer
from dolmen.serving.request import Request, SamplingParams


def continued(
    loaded: Loaded,
    tokenizer: PreTrainedTokenizer,
    prompts: Sequence[Sequence[int]],
    options: SamplingParams,
    until: Sequence[str] = (),
    seed: int = 0,
) -> list[str]:
    """What follows each prompt, without the string of `until` that it ends at, if any. Every rank
    calls it and has the same texts; those of dp write all of them. Raises ValueError for prompts
    that the model cannot take.
    """
    texts = [Detokenizer(tokenizer, until) for _ in prompts]
    with Engine(loaded.model, mesh=loaded.mesh) as engine:
        for number, prompt in enumerate(prompts):  # numbered alike
            engine.add(Request(prompt, options, id=number, seed=seed))
        while engine.busy:
            output = engine.step()
            require_finite(output.finished)
            for chosen in output.new_tokens:
                text = texts[chosen.number]
                text.add(chosen.token)
                if text.stopped is not None:
                    engine.cancel(chosen.number)
    for text in texts:
        text.end()
    return [text.whole for text in texts]
