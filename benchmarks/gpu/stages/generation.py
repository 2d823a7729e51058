"""Greedy text from a cache, beside transformers' generate: tokens per second, the time to read a
prompt, and whether both choose the same tokens.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks import sides
from benchmarks.gpu import clock, house, shapes
from benchmarks.gpu.case import Case, Context, Record
from benchmarks.gpu.shapes import Shape
from benchmarks.sides import Work
from dolmen.model import build
from dolmen.model.decoder import Decoder
from dolmen.serving import engine

Texts = list[list[int]]


def cases(context: Context) -> Iterator[Case]:
    shape = shapes.of(context, "llama-1b")
    yield Case("same tokens, fp32", 20, partial(same, context, shape))
    for batch in (1, 16):
        yield Case(f"bf16, {batch} at once", 20, partial(speed, context, shape, batch))


def prompts(shape: Shape, batch: int, length: int) -> Texts:
    chance = torch.Generator().manual_seed(2)
    return torch.randint(shape.spec.vocab_size, (batch, length), generator=chance).tolist()


def models(
    context: Context, shape: Shape, dtype: torch.dtype
) -> tuple[Decoder, Callable[[Texts, int], Texts]]:
    """dolmen's and transformers' model of the same weights; of the latter, how it generates."""
    device = torch.device(context.place)
    ours = build.build(shape.spec, house.single(device), dtype=dtype)
    house.fill(ours)
    work = Work(shape.model, shape.length, 1, house.fill)
    theirs = sides.transformers_model(work, device, dtype, "sdpa").eval()

    def generate(texts: Texts, new: int) -> Texts:
        given = torch.tensor(texts, device=device)
        with torch.no_grad():
            out = theirs.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=False,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
                eos_token_id=None,
            )
        return out[:, given.shape[1] :].tolist()

    return ours.eval(), generate


def share_equal(ours: Texts, theirs: Texts) -> float:
    """Of the tokens before each text's first difference, and of all."""
    alike = 0
    for a, b in zip(ours, theirs, strict=True):
        pairs = [x == y for x, y in zip(a, b, strict=True)]
        alike += pairs.index(False) if False in pairs else len(pairs)
    return alike / sum(map(len, ours))


def same(context: Context, shape: Shape, record: Record) -> None:
    """In fp32 both choose the same: rounding is a thousandth of the gap between two logits."""
    read, new = (128, 24) if context.full else (8, 4)
    ours, theirs = models(context, shape, torch.float32)
    texts = prompts(shape, 2, read)
    equal = share_equal(engine.generate(ours, texts, new), theirs(texts, new))
    record.check("share of tokens that differ", 1 - equal, 0, "greedy, fp32")


def speed(context: Context, shape: Shape, batch: int, record: Record) -> None:
    device = torch.device(context.place)
    read, new = (512, 64) if context.full else (8, 4)
    ours, theirs = models(context, shape, torch.bfloat16)
    texts = prompts(shape, batch, read)
    made: dict[str, Texts] = {}
    sides_of: dict[str, Callable[[int], Texts]] = {
        "dolmen": lambda n: engine.generate(ours, texts, n),
        "transformers": lambda n: theirs(texts, n),
    }
    for name, generate in sides_of.items():
        made[name] = generate(new)  # warm
        one = clock.timed(lambda g=generate: g(1), device, 5, 1)
        clock.clean(device)
        whole = clock.timed(lambda g=generate: g(new), device, 5, 0)
        rate = batch * (new - 1) / (whole["median"] - one["median"])
        told = {"prefill": one, "whole": whole, "tokens_per_second": rate}
        record.tell(**{name: told | {"peak": clock.peak(device)}})
    record.tell(equal=share_equal(made["dolmen"], made["transformers"]))
