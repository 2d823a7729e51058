"""Generation side by side with `transformers.generate`: the same weights, prompts and greedy
tokens, in fp32, in one process; sides take turns, and a ratio is the median over rounds of it.
On a machine that others use, CPU time of one thread says more than the clock.

    python benchmarks/generate.py                              all sizes, as many threads as cores
    python benchmarks/generate.py --sizes 20M --threads 1      one size, one thread
    python benchmarks/generate.py --products                   products of a weight, in us of CPU
    python benchmarks/generate.py --sizes 20M --speculative    dolmen alone, with prompt lookup

    batch 1, 16   prompts of 32 tokens, 64 new ones
    256 rows      prompts of 1 to 256 tokens, 4 to 128 new ones, drawn by a seed: dolmen takes them
                  as they come; transformers sorted by length, 32 at once, padded on the left, each
                  row until it has its number

A side of transformers is a cache of its own: dynamic, static, and static with its forward compiled
(--compiled). Tokens that are not those of dolmen are counted: two best scores may lie within
rounding of each other, and what follows such a token is another text.

Beside batch 1 stands what memory allows: the weights that a token reads, over the time of a token,
as a share of what the same threads read of as many bytes (a sum over them) in the same round.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

if not __package__:  # run as a file: Python then looks for `benchmarks` beside it
    sys.path.insert(0, str(Path(__file__).parents[1]))

from dolmen.conversion.source import open_source
from dolmen.model.decoder import Decoder
from dolmen.ops import int8
from dolmen.parallel.inference_linear import (
    Int8Rows,
    IntegerLinear,
    OneDnn,
    PrepackedProduct,
    Weights,
)
from dolmen.serving.config import SpeculativeConfig
from dolmen.serving.engine import Engine, NgramProposer, load_decoder
from dolmen.serving.request import Request, SamplingParams

Work = Sequence[tuple[list[int], int]]
"""Prompts, and how many new tokens each has."""
Side = Callable[[Work], list[list[int]]]

SIZES = {
    "20M": dict(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=3,
    ),
    "50M": dict(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
    ),
    "400MB": dict(
        vocab_size=16384,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
    ),
}
AT_ONCE = 32  # rows of transformers, whose batch lasts as long as its longest row


@dataclass(frozen=True)
class Case:
    """What all sides are asked."""

    name: str
    work: Work


def cases(vocabulary: int) -> list[Case]:
    """By a seed."""
    chance = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=chance))

    def prompt(length: int) -> list[int]:
        return torch.randint(vocabulary, (length,), generator=chance).tolist()

    return [
        Case("batch 1", [(prompt(32), 64)]),
        Case("batch 16", [(prompt(32), 64) for _ in range(16)]),
        Case("256 rows", [(prompt(draw(1, 256)), draw(4, 128)) for _ in range(256)]),
    ]


def dolmen_side(
    model: Decoder,
    weights: Weights = "stated",
    drafts: int = 0,
    accepted: list[str] | None = None,
    compile: bool = False,
) -> Side:
    """Through the engine, as a file of rows goes. `drafts`: tokens that prompt lookup drafts;
    `accepted` gets how many of them were. `compile`: compile decode steps.
    """
    proposer = None
    if drafts:
        proposer = NgramProposer(SpeculativeConfig(method="ngram", num_speculative_tokens=drafts))

    def answer(work: Work) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        with Engine(model, weights=weights, proposer=proposer, compile=compile) as engine:
            for i, (prompt, new) in enumerate(work):
                options = SamplingParams(temperature=0, max_new_tokens=new)
                engine.add(Request(prompt, options, id=i))
            while engine.busy:
                found |= {one.number: one.tokens for one in engine.step().finished}
        if accepted is not None:
            accepted[:] = [str(engine.acceptance)]
        return [found[i] for i in range(len(work))]

    return answer


class Enough(StoppingCriteria):
    """Each row ends with its own number of new tokens."""

    def __init__(self, begin: int, new: list[int]):
        self.ends = begin + torch.tensor(new)

    def __call__(self, input_ids, scores, **_):
        return input_ids.shape[1] >= self.ends


def transformers_side(model: LlamaForCausalLM, **how: object) -> Side:
    """`generate` as it says, rows of like lengths together."""

    def answer(work: Work) -> list[list[int]]:
        order = sorted(range(len(work)), key=lambda i: (work[i][1], len(work[i][0])))
        found: dict[int, list[int]] = {}
        for start in range(0, len(order), AT_ONCE):
            own = order[start : start + AT_ONCE]
            longest = max(len(work[i][0]) for i in own)
            tokens = torch.zeros((len(own), longest), dtype=torch.int64)
            mask = torch.zeros_like(tokens)
            for row, i in enumerate(own):
                prompt = work[i][0]
                tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
                mask[row, longest - len(prompt) :] = 1
            new = [work[i][1] for i in own]
            with torch.no_grad():
                out = model.generate(
                    tokens,
                    attention_mask=mask,
                    max_new_tokens=max(new),
                    do_sample=False,
                    pad_token_id=0,
                    stopping_criteria=StoppingCriteriaList([Enough(longest, new)]),
                    **how,
                )
            for i, row in zip(own, out[:, longest:].tolist(), strict=True):
                found[i] = row[: work[i][1]]
        return [found[i] for i in range(len(work))]

    return answer


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU."""
    start, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - cpu


def compare(case: Case, sides: dict[str, Side], weights: torch.Tensor, rounds: int) -> None:
    """Prints a line per side."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    read: list[tuple[float, float]] = []
    answers = {name: side(case.work) for name, side in sides.items()}  # what is built is built
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(timed(lambda side=side: side(case.work)))
        read.append(timed(weights.sum))
    tokens = sum(new for _, new in case.work)
    first = next(iter(sides))
    for name, own in seconds.items():
        pairs = zip(answers[name], answers[first], strict=True)
        differing = sum(a != b for one, two in pairs for a, b in zip(one, two, strict=True))
        clock, cpu = (statistics.median(one) / tokens * 1e3 for one in zip(*own, strict=True))
        text = f"  {case.name:9s} {name:30s} {clock:7.2f} ms per token (CPU {cpu:7.2f})"
        if name != first:
            text += f"   dolmen {_ratio(own, seconds[first], 0):.2f}x"
            text += f" (CPU time {_ratio(own, seconds[first], 1):.2f}x)"
        if len(case.work) == 1:
            text += (
                f"   {_ratio(read, own, 0) * tokens:.0%} (CPU {_ratio(read, own, 1) * tokens:.0%}"
            )
            text += ") of a read of the same bytes"
        if differing:
            text += f"   {differing} of {tokens:,} tokens differ"
        print(text, flush=True)


def _ratio(one: list[tuple[float, float]], other: list[tuple[float, float]], which: int) -> float:
    return statistics.median(a[which] / b[which] for a, b in zip(one, other, strict=True))


def measure(size: str, folder: Path, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES[size], max_position_embeddings=512, bos_token_id=None, eos_token_id=None
    )
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    ours = load_decoder(open_source(folder))
    if options.speculative:
        return speculate(ours, options)
    sides = {
        "dolmen": dolmen_side(ours),
        "transformers, dynamic": transformers_side(theirs),
        "transformers, static": transformers_side(
            theirs, cache_implementation="static", disable_compile=True
        ),
    }
    if options.compiled:
        sides["transformers, static, compiled"] = transformers_side(
            theirs, cache_implementation="static"
        )
    parameters = sum(p.numel() for p in theirs.parameters())
    # of the embedding a token reads one row
    weights = torch.zeros(parameters - theirs.get_input_embeddings().weight.numel())
    print(f"{size}: {parameters / 1e6:.1f} M parameters", flush=True)
    for case in cases(config.vocab_size):
        if not options.cases or case.name in options.cases:
            compare(case, sides, weights, options.rounds)


def speculate(model: Decoder, options: argparse.Namespace) -> None:
    """Print dolmen's times with prompt lookup beside those without. Random weights repeat
    themselves when they decode greedily, and so accept more than a text in a language would.
    """
    weights = next(iter(model.parameters())).detach()
    for case in cases(model.spec.vocab_size):
        for drafts in (2, 4, 8):
            if not options.cases or case.name in options.cases:
                accepted: list[str] = []
                side = dolmen_side(model, drafts=drafts, accepted=accepted)
                compare(
                    case, {"dolmen": dolmen_side(model), "ngram": side}, weights, options.rounds
                )
                print(f"{drafts} drafts: {accepted[0]}")


PRODUCTS = {"100M": (768, 2048), "500M": (1280, 3584)}
"""Hidden and intermediate size of models of these sizes."""


def products(rounds: int) -> None:
    """Print the CPU microseconds of a product with a weight [out, in], by each kind of prepacked
    weight, and by `quantized::linear_dynamic`, whose one scale for all rows gives other bits.
    """
    chance = torch.Generator().manual_seed(0)
    print(
        f"{'in':>6} {'out':>6} {'rows':>5} {'fp32':>8} {'int8 x bf16':>12} {'int8 x u8':>10}",
        end="",
    )
    print(f" {'dynamic':>8}")
    for hidden, wide in PRODUCTS.values():
        for inputs, outputs in ((hidden, hidden), (hidden, wide), (wide, hidden)):
            weight = torch.randn(outputs, inputs, generator=chance)
            kinds = [OneDnn(weight), Int8Rows(weight), IntegerLinear(weight), dynamic(weight)]
            for rows in (1, 4, 16):
                x = torch.randn(rows, inputs, generator=chance)
                times: list[list[float]] = [[] for _ in kinds]
                for _ in range(rounds):  # kinds take turns
                    for own, kind in zip(times, kinds, strict=True):
                        own.append(
                            timed(lambda kind=kind, x=x: [kind(x, None) for _ in range(50)])[1]
                        )
                us = [statistics.median(own) / 50 * 1e6 for own in times]
                print(
                    f"{inputs:6} {outputs:6} {rows:5} {us[0]:8.0f} {us[1]:12.0f} {us[2]:10.0f} "
                    f"{us[3]:8.0f}",
                    flush=True,
                )


def dynamic(weight: torch.Tensor) -> PrepackedProduct:
    """torch's quantized product with scales per output."""
    payload, scale = int8.quantise(weight)
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    whole = torch._make_per_channel_quantized_tensor(payload, scale.double(), zeros, 0)
    packed = torch.ops.quantized.linear_prepack(whole, None)
    return lambda x, bias: torch.ops.quantized.linear_dynamic(x, packed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--cases", nargs="+", help="default: all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--products", action="store_true", help="products of a weight alone")
    parser.add_argument("--speculative", action="store_true", help="prompt lookup, dolmen alone")
    parser.add_argument("--compiled", action="store_true", help="transformers compiled, too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.rounds} rounds")
    if options.products:
        with torch.no_grad():
            return products(options.rounds)
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            measure(size, Path(folder), options)


if __name__ == "__main__":
    main()
