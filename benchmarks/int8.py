"""What weights of int8 cost: the loss per token of a model on a text, with weights as they are and
with `--weights int8`, and how many likeliest tokens are others.

    python benchmarks/int8.py MODEL --text FILE          a text that it was not trained on
    python benchmarks/int8.py MODEL --memory             what is resident in place of these, in
                                                         processes of their own (Linux)
"""

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

if not __package__:  # run as a file: Python then looks for `benchmarks` beside it
    sys.path.insert(0, str(Path(__file__).parents[1]))

from dolmen.conversion.source import open_source, tokenizer_folder
from dolmen.data.tokenizer import load_tokenizer
from dolmen.model.decoder import Decoder
from dolmen.parallel.inference_linear import Weights
from dolmen.serving.engine import Engine, load_decoder
from dolmen.serving.request import Request, SamplingParams


def judged(model: Decoder, windows: list[list[int]], weights: Weights) -> tuple[float, list[int]]:
    """The mean of -log p of all tokens but the first of each window, and the likeliest of each."""
    scores, likeliest = [], []
    with Engine(model, weights=weights) as engine:
        for i, window in enumerate(windows):
            options = SamplingParams(temperature=0, max_new_tokens=0)
            engine.add(Request(window, options, id=i, prompt_logprobs=True, top=1))
        while engine.busy:
            for ended in sorted(engine.step().finished, key=lambda one: one.number):
                scores += [one.logprob for one in ended.prompt_logprobs]
                likeliest += [one.top[0][0] for one in ended.prompt_logprobs]
    return -sum(scores) / len(scores), likeliest


def resident(folder: str, weights: Weights) -> None:
    """Tells what is resident before there is a model, once it writes, and at the most."""
    source = open_source(folder)
    before = _resident()
    with Engine(load_decoder(source, weights=weights), weights=weights) as engine:
        engine.add(Request([5, 6, 7], SamplingParams(temperature=0, max_new_tokens=16)))
        while engine.busy:
            engine.step()
        now = _resident()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{weights}: {now - before:.0f} MiB once it writes, {most - before:.0f} at the most")


def _resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--memory-of", choices=("stated", "int8"), help=argparse.SUPPRESS)
    parser.add_argument("--windows", type=int, default=64)
    options = parser.parse_args()
    if options.memory_of:
        return resident(options.model, options.memory_of)
    if options.memory:
        for weights in ("stated", "int8"):
            words = [sys.executable, __file__, options.model, "--memory-of", weights]
            subprocess.run(words, check=True)
        return
    if options.text is None:
        parser.error("give --text FILE, or --memory")
    source = open_source(options.model)
    tokenizer = load_tokenizer(tokenizer_folder(source), option="")
    tokens = tokenizer(Path(options.text).read_text())["input_ids"]
    length = source.spec.max_position_embeddings
    windows = [tokens[i : i + length] for i in range(0, len(tokens), length)][: options.windows]
    model = load_decoder(source, dtype=torch.float32)
    exact, own = judged(model, windows, "stated")
    rounded, others = judged(model, windows, "int8")
    differing = sum(a != b for a, b in zip(own, others, strict=True))
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters / 1e6:.1f} M parameters, {len(own):,} tokens: loss {exact:.4f}, with int8 "
        f"{rounded:.4f} ({rounded - exact:+.4f}); {differing / len(own):.1%} of the likeliest "
        "tokens are others"
    )


if __name__ == "__main__":
    main()
