"""Prompts of 1 to 200 tokens that end at different steps, in one batch in which fewer run at once
than there are: each text is that of transformers for its prompt alone, greedy, in fp32. On one
process, and split over two.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from family_cases import CASES, build, save

from dolmen.conversion.source import open_source
from dolmen.core import mesh as meshes
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.serving import engine
from dolmen.serving.kv_cache import CacheUsage

PROMPTS = (200, 1, 33, 2, 150, 64, 1, 7, 32, 65, 199, 17)  # tokens of each
NEW, AT_ONCE = 16, 5
STOPS = ((2, 13), (4, 5), (8, 11))  # (text, step) of tokens that end one
UNTIED = dict(tie_word_embeddings=False)  # tied, these models repeat a token
LONG = {
    "gpt2": dict(n_positions=256, **UNTIED),
    "bloom-uneven-heads": UNTIED,
    **dict.fromkeys(
        (
            *("llama", "llama-yarn", "mistral-window", "mixtral", "qwen2-window", "qwen3"),
            *("qwen3-moe", "gemma", "gemma2", "deepseek-v2", "deepseek-v3-halves"),
            *("falcon", "falcon-grouped", "falcon-alibi"),
        ),
        dict(max_position_embeddings=256, **UNTIED),
    ),
} | {name: case.long for name, case in CASES.items() if case.long is not None}
"""One of each family at least, and what makes its context long enough."""
OWN = (
    *("llama", "gpt2", "bloom-uneven-heads", "falcon", "falcon-alibi", "mistral-window", "mixtral"),
    *("gemma3", "gpt-neo", "deepseek-v2", "gpt-oss", "olmo2", "chatglm-untied", "qwen"),
)
"""Those that keep something of their own of a token, or read it otherwise: positions of each kind,
one key-value head, windows, latents, sinks, norms over all heads. The others are of the full tier.
"""


SPLIT = ("llama", "bloom-uneven-heads", "falcon", "gemma3", "deepseek-v2", "gpt-oss", "qwen")
"""Those of OWN that two ranks split otherwise: one key-value head, latents, sinks, ALiBi's slopes,
query, key and value in one matrix.
"""


def model_of(case: str) -> transformers.PreTrainedModel:
    """Its biases are around 0: around 1 they alone choose the next token."""
    model = build(case, **LONG[case])
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias") and p.ndim == 1:
                p.sub_(1)
    return model


def prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(61, (n,), generator=chance).tolist() for n in PROMPTS]


@cache
def theirs(case: str) -> tuple[list[list[int]], frozenset[int]]:
    """Each prompt by itself, and the tokens at which texts end, some of those that there were."""
    model = model_of(case)
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=0, max_new_tokens=NEW, do_sample=False
    )
    whole = [_alone(model, prompt) for prompt in prompts()]
    stop = frozenset(whole[text][step] for text, step in STOPS)
    ends = [[i + 1 for i, token in enumerate(text) if token in stop] for text in whole]
    return [text[: end[0]] if end else text for text, end in zip(whole, ends, strict=True)], stop


@torch.no_grad()
def _alone(model: transformers.GenerationMixin, prompt: list[int]) -> list[int]:
    """All of the prompt is seen, its 0 too, which transformers would take for padding."""
    text = torch.tensor([prompt])
    return model.generate(text, attention_mask=torch.ones_like(text))[0, len(prompt) :].tolist()


def ours(
    folder: Path, stop: frozenset[int], mesh: Mesh = SINGLE
) -> tuple[list[list[int]], CacheUsage]:
    held: list[CacheUsage] = []
    model = engine.load_decoder(open_source(folder), mesh)
    texts = engine.generate(model, prompts(), NEW, stop=stop, batch=AT_ONCE, on_memory=held.append)
    return texts, held[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n in OWN else pytest.mark.full) for n in LONG]
)
def test_each_text_is_that_of_its_prompt_alone(case, tmp_path):
    want, stop = theirs(case)
    texts, held = ours(save(model_of(case), tmp_path), stop)
    assert texts == want
    assert len({len(text) for text in texts}) > 1  # they end at different steps
    assert held.in_use * held.page < held.rectangle


def two_ranks(folder: Path, stops: dict[str, frozenset[int]]) -> dict[str, list[list[int]]]:
    mesh = meshes.build_mesh(1, 2, torch.device("cpu"))
    return {case: ours(folder / case, stop, mesh)[0] for case, stop in stops.items()}


@pytest.mark.parametrize("own", [True, pytest.param(False, marks=pytest.mark.full)])
def test_each_text_is_that_of_its_prompt_alone_on_two_ranks(own, spawn, tmp_path):
    cases = [case for case in LONG if (case in SPLIT) == own]
    for case in cases:
        save(model_of(case), tmp_path / case)
    texts = spawn(2)(two_ranks, tmp_path, {case: theirs(case)[1] for case in cases})
    assert [case for case in cases if texts[case] != theirs(case)[0]] == []
