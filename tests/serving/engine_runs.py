"""What tests ask of an engine, and how it ended."""

from decoders import VOCABULARY

from dolmen.core.mesh import SINGLE, Mesh
from dolmen.serving.engine import Engine
from dolmen.serving.request import FinishedSequence, Limits, Request, SamplingParams

WARM = SamplingParams(temperature=1.2, top_k=20, max_new_tokens=8)
LONG = [(7 * i) % VOCABULARY for i in range(20)]  # with 8 new ones a page and a part of the next


def run(
    model, requests, limits: Limits = Limits(), mesh: Mesh = SINGLE, **more
) -> dict[tuple, FinishedSequence]:
    """(id, sample) -> how it ended."""
    found = {}
    with Engine(model, limits=limits, mesh=mesh, **more) as engine:
        for request in requests:
            engine.add(request)
        while engine.busy:
            for ended in engine.step().finished:
                assert (ended.id, ended.sample) not in found
                found[ended.id, ended.sample] = ended
        assert not engine._runner.cache.table.in_use  # nothing is held
    return found


def tokens(found: dict[tuple, FinishedSequence]) -> dict[tuple, list[int]]:
    return {name: ended.tokens for name, ended in found.items()}


def several(prompts, count: int, options: SamplingParams = WARM) -> list[Request]:
    return [
        Request(prompt, options, id=f"row {i}", seed=3, samples=count)
        for i, prompt in enumerate(prompts)
    ]


SCORED = SamplingParams(temperature=0.8, top_k=30, max_new_tokens=8)


def scored(prompts, adapter: str | None = None, **more) -> list[Request]:
    """Known by their numbers; by those and the adapter, where each has one."""
    ids = [i if adapter is None else f"{adapter} {i}" for i in range(len(prompts))]
    more |= dict(logprobs="raw", prompt_logprobs=True, adapter=adapter)
    return [Request(p, SCORED, id=i, **more) for i, p in zip(ids, prompts, strict=True)]
