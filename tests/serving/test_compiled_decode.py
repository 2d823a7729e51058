"""Compiled decode steps against plain ones: the same greedy tokens, from one graph for all layers,
lengths and, behind the first, batches. Products are batch-invariant here, so what differs is the
order of a norm's sum; tokens that it can change are counted (`close`).
"""

from dataclasses import replace

import pytest
import torch
from decoders import DECODERS, VOCABULARY
from tiny_models import Flat, build, initialize

from dolmen.core.mesh import SINGLE
from dolmen.core.torch_private import compute
from dolmen.model import block
from dolmen.serving.engine import Engine
from dolmen.serving.request import Request, SamplingParams


def run(model, *, batch: int, compile: bool, weights="stated", new: int = 12):
    """Greedy tokens of `batch` prompts of different lengths, with log-probabilities, and the number
    of near ties.
    """
    params, out, close = SamplingParams(max_new_tokens=new), {}, 0
    with Engine(model, weights=weights, compile=compile) as engine:
        for i in range(batch):
            prompt = [(7 * j + 3 * i) % VOCABULARY for j in range(2 + 2 * i)]
            engine.add(Request(prompt, params, i, logprobs="raw"))
        while engine.busy:
            for sequence in engine.step().finished:
                scores = [logprob.logprob for logprob in sequence.logprobs]
                out[sequence.number] = sequence.tokens, scores
                close += sequence.close
    return [out[i] for i in range(batch)], close


# wide enough that weights are packed
WIDE = Flat(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
    initializer_range=0.1,
)
DTYPES = {
    "float32": (torch.float32, "stated"),
    "bfloat16": (torch.bfloat16, "stated"),
    "int8": (torch.float32, "int8"),
}


@pytest.fixture
def graphs(monkeypatch):
    """Names of the blocks' functions whose graphs were compiled, one entry each; graphs of earlier
    tests are forgotten.
    """
    compiled: list[str] = []

    def backend(graph, inputs):
        compiled.append(graph.__class__.__name__)
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(compute, "find_compiler", lambda: "g++")
    monkeypatch.setattr(
        block, "_compile", lambda function: torch.compile(function, backend=backend)
    )
    return compiled


def decoder(tiny, dtype=torch.float32):
    model = build(tiny, SINGLE, dtype=dtype)
    initialize(model, 0)
    return model.eval()


# each operator of theirs is one of another's: a graph takes two seconds to be taken
ALIKE = ("uneven-kv", "window", "side-by-side-two-norms", "latent")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n in ALIKE)) for n in DECODERS]
)
def test_a_graph_gives_the_tokens_of_plain_steps(name, graphs):
    """The graph that torch.compile takes, run as it is: its operators are those of the step."""
    model = decoder(DECODERS[name])
    for batch in (1, 2, 3):
        plain, close = run(model, batch=batch, compile=False)
        found, _ = run(model, batch=batch, compile=True)
        pairs = list(zip(found, plain, strict=True))
        same = [(a, b) for (tokens, a), (expected, b) in pairs if tokens == expected]
        assert len(same) >= batch - close
        for scores, expected in same:
            # sums over pages in another order than those of one sequence
            assert torch.allclose(torch.tensor(scores), torch.tensor(expected), atol=1e-4)
        # of each kind of layer at most one of a single sequence, and one of several
        kinds = len({str(spec) for spec in DECODERS[name].spec.blocks})
        assert (batch > 1) < len(graphs) <= min(batch, 2) * kinds


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_weights_are_inputs_of_the_graph(dtype, graphs):
    """Of several sequences the operators are the same, and so are the bits. 40 tokens are a page
    and more, so the pool of pages grows.
    """
    kind, weights = DTYPES[dtype]
    model = decoder(WIDE, kind)
    found, expected = (
        run(model, batch=3, compile=c, weights=weights, new=40)[0] for c in (True, False)
    )
    assert found == expected and len(graphs) == 1
    # a change of the weights, as between rollouts, is no change of the graph
    with torch.no_grad():
        model.get_parameter("layers.0.mlp.up.weight").mul_(-1)
    changed, expected = (run(model, batch=3, compile=c, weights=weights)[0] for c in (True, False))
    assert changed == expected != found and len(graphs) == 1
    # nor is another number of sequences, as where some finish
    for batch in (4, 2):
        more, expected = (
            run(model, batch=batch, compile=c, weights=weights)[0] for c in (True, False)
        )
        assert more == expected and len(graphs) == 1


def test_samples_that_share_pages_are_compiled(graphs):
    """As groups of rollouts do: of two prompts, one of a page and a part, three and two samples."""
    model, found = decoder(WIDE), []
    for compile in (True, False):
        tokens: dict[tuple[int, int], list[int]] = {}
        with Engine(model, compile=compile) as engine:
            for i, (length, samples) in enumerate(((40, 3), (20, 2))):
                prompt = [(7 * j + i) % VOCABULARY for j in range(length)]
                params = SamplingParams(1.0, max_new_tokens=10 + 5 * i)
                engine.add(Request(prompt, params, i, samples=samples))
            while engine.busy:
                for sequence in engine.step().finished:
                    tokens[sequence.number, sequence.sample] = sequence.tokens
        found.append(tokens)
    assert found[0] == found[1]
    # with shared pages, and, when the longer prompt's samples have finished, without
    assert len(graphs) == 2


REQUESTS = ((1, 1, 3), (3, 1, 40), (2, 2, 20), (1, 4, 60), (1, 3, 33), (1, 2, 32))
"""Requests, samples of each, tokens of a prompt; a page has 32."""


@pytest.mark.full
def test_after_a_warm_up_no_request_compiles(graphs):
    """A server's first clients would wait for it."""
    params, number = SamplingParams(max_new_tokens=3), -1
    wide = replace(WIDE, max_position_embeddings=128)
    with Engine(decoder(wide), compile=True) as engine:
        engine.warm_up()
        assert len(graphs) == 4 and not engine.busy and engine.pages == 0
        for requests, samples, length in (*REQUESTS, (1, 4, 90)):
            prompt = [j % VOCABULARY for j in range(length)]
            for _ in range(requests):
                number = engine.add(Request(prompt, params, samples=samples))
            while engine.busy:
                engine.step()
            assert len(graphs) == 4, (requests, samples, length)
    assert number == sum(requests for requests, *_ in REQUESTS)  # from 0


@pytest.mark.spawn
@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_steps_give_the_tokens_of_plain_ones(dtype):
    """By the real compiler. A last bit of a norm may round an activation to the next of int8's 255
    steps, and of bf16's 256, so that other tokens than near ties may follow: a share is held.
    """
    if not compute.find_compiler():
        pytest.skip("no C++ compiler")
    kind, weights = DTYPES[dtype]
    model = decoder(WIDE, kind)
    torch.compiler.reset()
    for batch in (1, 5):
        found, _ = run(model, batch=batch, compile=True, weights=weights)
        plain, close = run(model, batch=batch, compile=False, weights=weights)
        same = sum(a[0] == b[0] for a, b in zip(found, plain, strict=True))
        assert same >= (batch - close if dtype == "float32" else batch * 0.6)


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    model = decoder(WIDE)
    monkeypatch.setattr(compute, "find_compiler", lambda: "")
    with pytest.raises(ValueError, match="--compile needs a C\\+\\+ compiler"):
        Engine(model, compile=True)


def test_drafts_and_prompts_are_not_compiled(graphs):
    """A forward of a prompt, or of several tokens of a sequence, has shapes of its own."""
    model = decoder(DECODERS["grouped"])
    run(model, batch=3, compile=True, new=1)
    assert not graphs
