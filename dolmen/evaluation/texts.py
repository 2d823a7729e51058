"""Texts that a model writes while it is measured: answers to tasks, and samples of a run."""

from collections.abc import Sequence

from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.evaluation.perplexity import Loaded
from dolmen.serving.engine import Engine, require_finite
from dolmen.serving.options import Options
from dolmen.serving.request import Request
from dolmen.serving.text import Incremental


def continued(
    loaded: Loaded,
    tokenizer: PreTrainedTokenizer,
    prompts: Sequence[Sequence[int]],
    options: Options,
    until: Sequence[str] = (),
    seed: int = 0,
) -> list[str]:
    """What follows each prompt, without the string of `until` that it ends at, if any. Every rank
    calls it and has the same texts; those of dp write all of them. Raises ValueError for prompts
    that the model cannot take.
    """
    texts = [Incremental(tokenizer, until) for _ in prompts]
    with Engine(loaded.model, mesh=loaded.mesh) as engine:
        for number, prompt in enumerate(prompts):  # numbered alike
            engine.add(Request(prompt, options, id=number, seed=seed))
        while engine.busy:
            happened = engine.step()
            require_finite(happened.ended)
            for chosen in happened.chosen:
                text = texts[chosen.number]
                text.add(chosen.token)
                if text.stopped is not None:
                    engine.cancel(chosen.number)
    for text in texts:
        text.end()
    return [text.whole for text in texts]
