"""Text from a model: load a folder, read the prompts, draw one token per step.

    model = load("path/to/model")
    generate(model, [[1, 15043]], max_new_tokens=16) -> [[3186, ...]]

Every rank of tp runs the same calls on the same prompts, gathers the same logits and chooses the
same token.
"""

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dolmen.convert import hf
from dolmen.core import collectives
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.files import gate, kinds
from dolmen.model import build
from dolmen.model.decoder import Decoder
from dolmen.parallel import data, vocabulary
from dolmen.serve import sample
from dolmen.serve.cache import Cache

TOKENS_AT_ONCE = 1 << 12  # of a prompt, one forward: bounds the logits nobody reads


def load_decoder(
    folder: Path | str, mesh: Mesh = SINGLE, dtype: torch.dtype | None = None
) -> Decoder:
    """The model of a Hugging Face folder or hub id, split over tp, for inference: in `dtype`, or
    else that of its config.json. Raises ValueError or KeyError, before anything is built, for what
    does not fit.
    """
    folder = hf.resolve_model(folder)
    source = hf.read_config(folder)
    hf.check_tensors(folder, source)
    model = build.build(source.tree, mesh, dtype=dtype or hf.stated_dtype(source))
    build.load(model, lambda write: hf.load_weights(folder, source, write))
    return model.eval()


def stop_tokens(folder: Path | str) -> set[int]:
    """The end-of-text ids that a model folder or hub id names, in generation_config.json or else
    config.json.
    """
    folder = hf.resolve_model(folder)
    for file in (folder / "generation_config.json", folder / "config.json"):
        ids = (
            gate.read_json(file, kinds.GENERATION_CONFIG).get("eos_token_id")
            if file.exists()
            else None
        )
        if ids is not None:
            return set(ids) if isinstance(ids, list) else {ids}
    return set()


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Collection[int] = (),
    seed: int = 0,
    on_token: Callable[[int, int], None] | None = None,
    known: Collection[int] | None = None,
) -> list[list[int]]:
    """New tokens of each prompt: at most `max_new_tokens`, the last a member of `stop` where it
    stopped at one; with `known`, the tokenizer's ids, none that is not one of them.

    Temperature 0 is greedy. `on_token(prompt index, token)` is called as each token is chosen.
    Prompts of equal length run as one batch, lengths one after the other; the random numbers of a
    prompt follow from (seed, its index). A model under ZeRO needs the same call on every rank of
    dp. Raises ValueError before the first forward for settings and prompts the model cannot take,
    and later for logits that are not finite.
    """
    sample.check_knobs(temperature, top_k, top_p)
    _check(model, prompts, max_new_tokens)
    out: list[list[int]] = [[] for _ in prompts]
    unknown = sorted(set(range(model.tree.vocab_size)) - set(known)) if known else []

    def emit(index: int, token: int) -> bool:
        """Whether the prompt goes on after this token."""
        out[index].append(token)
        if on_token is not None:
            on_token(index, token)
        return token not in stop and len(out[index]) < max_new_tokens

    def choose(logits: Tensor, indices: list[int], step: int) -> Tensor:
        uniforms = torch.tensor(
            [sample.uniform(seed, i, step) for i in indices], dtype=torch.float64
        )
        if unknown:
            logits[:, unknown] = -math.inf
        chosen = sample.sample(logits, uniforms, temperature, top_k, top_p)
        # all ranks have the same logits, but sums on a GPU may differ in the last bit from run to
        # run: agree on one
        return collectives.reduce_scalar(chosen, model.tp.axis, "max")

    # a compiled block would be compiled again for every length
    with data.inference(model), torch.compiler.set_stance("force_eager"):
        for length in sorted({len(p) for p in prompts}):
            indices = [i for i, p in enumerate(prompts) if len(p) == length]
            _generate(
                model,
                indices,
                [prompts[i] for i in indices],
                length + max_new_tokens - 1,
                choose,
                emit,
            )
    return out


def _generate(
    model: Decoder,
    indices: list[int],
    prompts: list[Sequence[int]],
    maximum: int,
    choose: Callable[[Tensor, list[int], int], Tensor],
    emit: Callable[[int, int], bool],
) -> None:
    """Prompts of one length, until none goes on. Finished rows stay in the batch, unread."""
    cache, live, step = Cache(model.tree, maximum), set(indices), 0
    tokens = torch.tensor(prompts, device=next(model.parameters()).device)
    while True:
        logits = _read(model, tokens, cache)
        if not logits.amax(-1).isfinite().all():
            raise ValueError(
                f"the logits of new token {step + 1} are not finite: the model has diverged, or "
                "needs --dtype float32 (generate), or `dolmen.load(..., dtype=torch.float32)`"
            )
        chosen = choose(logits, indices, step)
        for i, token in zip(indices, chosen.tolist(), strict=True):
            if i in live and not emit(i, token):
                live.remove(i)
        if not live:
            return
        tokens, step = chosen[:, None], step + 1


def _read(model: Decoder, tokens: Tensor, cache: Cache) -> Tensor:
    """tokens [batch, new] after those of the cache -> logits of what follows the last, [batch,
    vocab] fp32 or wider.
    """
    batch = len(tokens)
    if model.tp.sequence:  # splits tokens evenly: fill up with rows that nobody reads
        tokens = torch.cat((tokens, tokens[-1:].expand(-batch % model.tp.axis.size, -1)))
    *before, last = tokens.split(max(1, TOKENS_AT_ONCE // len(tokens)), 1)
    for part in before:
        model(part, cache=cache)
    logits = model(last, cache=cache)
    logits = vocabulary.gather_vocabulary(logits[:batch, -1], model.tree.vocab_size, model.tp.axis)
    return logits if logits.dtype == torch.float64 else logits.float()


def _check(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: use --max-new-tokens 1 or more")
    vocabulary, most = model.tree.vocab_size, model.tree.max_position_embeddings
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(
                f"prompt {i} has 0 tokens: give at least 1, such as the tokenizer's beginning "
                f"of text"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise ValueError(
                f"prompt {i} has tokens {min(prompt)} to {max(prompt)}, the model's vocab_size is "
                f"{vocabulary}: use the tokenizer of the model"
            )
    longest = max(map(len, prompts), default=0)
    read = longest + max_new_tokens - 1  # the last new token is not read
    if read <= most:
        return
    text = (
        f"a prompt of {longest} tokens and {max_new_tokens} new ones read {read} positions, "
        f"max_position_embeddings is {most}"
    )
    if model.tree.longest is not None:
        knob = (
            f"use --max-new-tokens {most - longest + 1}"
            if longest <= most
            else "use a shorter prompt"
        )
        raise ValueError(f"{text}: {knob}")
    warnings.warn(
        f"{text}: the model was not made for more, and its text may be poor", stacklevel=3
    )
