"""The flash and cuDNN backends without a GPU: their glue by a stand-in (tests/flash_kernel.py),
against the definition in float64 and the backend of blocks.
"""

from dataclasses import replace
from math import prod

import flash_kernel
import pytest
import torch
import torch.nn.functional as F
from tiny_models import Flat, build, initialize
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dolmen.core.mesh import SINGLE, Axis
from dolmen.model.head import cross_entropy_function
from dolmen.ops.attention import Attend, Documents, flash, operators, reference
from dolmen.ops.attention.reference import CASES, ROADS
from dolmen.ops.kernels import H100
from dolmen.parallel.context import ContextParallel

HERE = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def kernel():
    with flash_kernel.on_cpu() as calls:
        yield calls


# float64: sums in another order; bf16: inputs and results are rounded by 2^-9, probabilities are
# not, but pieces are before they are merged
@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-13), pytest.param(torch.bfloat16, 1e-2, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", CASES)
def test_definition(name, road, dtype, tolerance):
    for backend in ("flash", "cudnn"):
        found = reference.errors(backend, CASES[name], dtype, HERE, road)
        assert all(error <= tolerance for error in found.values()), (backend, found)


CUDNN = {  # case and road -> whether cuDNN computes some of it; the others are FlashAttention-2's
    ("grouped", "whole"): True,
    ("grouped", "ring"): True,
    ("window in a chunk", "whole"): False,
    ("documents", "whole"): False,
}


def test_cudnn_computes_whole_sequences_alone(kernel):
    for (name, road), some in CUDNN.items():
        kernel.clear()
        reference.errors("cudnn", CASES[name], torch.bfloat16, HERE, road)
        assert ("cudnn" in kernel) == some, (name, road, kernel)


@pytest.mark.parametrize(
    "bounds, queries, keys, fits",
    [
        (operators.CAUSAL, 8, 8, True),
        (operators.ALL, 4, 8, True),
        (operators.CAUSAL, 4, 8, False),  # whose diagonal would begin at the first key
        ((3, 0), 8, 8, False),
        (operators.ALL, 1, 8, False),
    ],
)
def test_calls_that_fit_cudnn(bounds, queries, keys, fits):
    call = operators.FlashCall.from_run(None, bounds, 1.0, True)
    assert call.fits_cudnn(queries, keys) == fits
    assert not call._replace(cudnn=False).fits_cudnn(queries, keys)


def test_a_wrong_window_is_seen(monkeypatch):
    monkeypatch.setattr(flash, "_causal", lambda window: (-1 if window is None else window, 0))
    found = reference.errors("flash", CASES["window in a chunk"], torch.float64, HERE)
    assert all(error > 0.05 for error in found.values()), found


def test_documents_without_their_runs_are_refused():
    q, k, v, _ = CASES["documents"].tensors(torch.float32, HERE)
    starts = CASES["documents"].starts
    with pytest.raises(ValueError, match="needs one run of queries, but got 0"):
        flash.attention(q, k, v, Attend().with_documents(Documents.from_starts(starts)))


class Seen(TorchDispatchMode):
    """The operators that are called, and the elements of the largest tensor that one makes."""

    def __init__(self):
        super().__init__()
        self.called, self.largest = [], 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        self.called.append(op.overloadpacket.__name__)
        made = out if isinstance(out, (tuple, list)) else [out]
        sizes = [prod(t.shape) for t in made if isinstance(t, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return out

    @property
    def attending(self) -> set[str]:
        return {name for name in self.called if "attention" in name or "bmm" in name}


LENGTH, SIZE, HEADS, KV = 32768, 128, 8, 2
FLASH = {"_flash_attention_forward", "_flash_attention_backward"}
CUDNN_OPERATORS = {
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
}
LONG = {  # window, documents
    "plain": (None, False),
    "window": (4096, False),
    "documents": (None, True),
    "documents and window": (4096, True),
}


def gradients_of_a_long_text(cp: ContextParallel, name: str) -> Seen:
    """Forward and backward of attention to 32,768 tokens, as traced by shapes alone."""
    window, several = LONG[name]
    host = torch.zeros(1, LENGTH, dtype=torch.int64)
    host[:, 5000:], host[:, 20000:], host[:, 20001:] = 5000, 20000, 20001
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = [(1, LENGTH // cp.axis.size, heads, SIZE) for heads in (HEADS, KV, KV)]
        leaves = [torch.empty(s, dtype=torch.bfloat16).requires_grad_() for s in shapes]
        starts = torch.empty(1, LENGTH, dtype=torch.int64)
        with Seen() as seen:
            documents = cp.documents(Documents(starts, host)) if several else None
            cp.attention(*leaves, Attend(window).with_documents(documents)).sum().backward()
    return seen


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("size", [1, 8])
def test_no_tensor_has_queries_times_keys(size, name, monkeypatch):
    """The largest is a gradient or a key of the whole text; queries times keys, of one head and one
    chunk, are 32 times that under cp 8 and 128 times without.
    """
    cp = ContextParallel(Axis("cp", size, size - 1), "gather", "flash")
    # what crosses is another test's: here each rank's keys stand for all
    monkeypatch.setattr(
        ContextParallel, "gather_keys", lambda cp, *kv: [t.repeat(1, size, 1, 1) for t in kv]
    )
    seen = gradients_of_a_long_text(cp, name)
    assert seen.attending == FLASH
    assert seen.largest <= LENGTH * HEADS * SIZE
    assert seen.largest < (LENGTH // 2 // size) * LENGTH


def test_a_mask_would_be_seen(monkeypatch):
    """The road that was taken before: a mask for SDPA, which does without flash then."""

    def masked(q, k, v, attend):
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        turned = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(*turned, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    monkeypatch.setattr(flash, "attention", masked)
    cp = ContextParallel(Axis("cp", 1, 0), "gather", "flash")
    seen = gradients_of_a_long_text(cp, "documents")
    assert seen.largest >= LENGTH * LENGTH and seen.attending != FLASH


CONFIG = Flat(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window=16,
    sliding_layers=(1,),
    norm="layernorm",  # the fused RMSNorm of a GPU has no backward on a CPU
)


def decoder(dtype: torch.dtype = torch.bfloat16, **changes):
    """Built on a CPU as on an H100."""
    model = build(replace(CONFIG, **changes), SINGLE, dtype=dtype, hardware=H100)
    initialize(model, 0)
    return model


def texts(several: int, length: int = 512) -> tuple[torch.Tensor, Documents]:
    """Tokens [2, length], and `several` documents in each sequence."""
    g = torch.Generator().manual_seed(several)
    begins = torch.zeros(2, length, dtype=torch.int64)
    for row in begins:
        for at in torch.randperm(length - 1, generator=g)[: several - 1].sort().values + 1:
            row[at:] = at
    return torch.randint(32, (2, length), generator=g), Documents.from_starts(begins)


@pytest.mark.parametrize("several", [None, 5])
def test_a_model_built_as_on_an_h100_calls_what_was_chosen(several):
    model, (tokens, documents) = decoder(), texts(several or 1)
    assert model.split.kernels.attention == "cudnn"
    with Seen() as seen:
        model(
            tokens, cross_entropy_function(tokens), documents=None if several is None else documents
        ).backward()
    if several is None:  # the first layer has no window
        assert seen.attending == FLASH | CUDNN_OPERATORS
    else:
        assert seen.attending == FLASH
    with Seen() as seen, torch.no_grad():
        decoder(torch.float32)(tokens, documents=documents)
    assert seen.attending == {"bmm"}  # fp32: our blocks


def test_a_model_with_flash_is_the_model_with_blocks():
    """Losses of documents and windows, in bf16: both round what they sum, at other places."""
    tokens, documents = texts(5)
    blocks = build(CONFIG, SINGLE, dtype=torch.bfloat16)
    initialize(blocks, 0)
    losses = [
        float(m(tokens, cross_entropy_function(tokens), documents=documents).detach())
        for m in (decoder(), blocks)
    ]
    assert abs(losses[0] / losses[1] - 1) < 1e-3 and losses[0] != losses[1]


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
@pytest.mark.parametrize("name", ["grouped", "documents"])
def test_what_is_traced_has_the_shapes_of_what_is_computed(name, backend):
    """Each operator's fake against the operator, and nothing of its inputs in its outputs."""
    case = CASES[name]
    q, k, v, g = case.tensors(torch.float32, HERE)
    run = None
    if case.starts is not None:
        q, k, v, g = (t.flatten(0, 1) for t in (q, k, v, g))
        begins = reference.spec.begins(case.starts)
        run = reference.spec.run(begins, 0, case.length, HERE)
    call = operators.FlashCall.from_run(run, operators.CAUSAL, 0.25, backend == "cudnn")
    kept = q, k, v, *operators.forward(q, k, v, call)
    checks = dict(test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(operators.opaque_forward, (q, k, v, *call), **checks)
    torch.library.opcheck(operators.opaque_backward, (g, *kept, *call), **checks)


@pytest.mark.slow
def test_one_compilation_serves_all_numbers_of_documents():
    """Without a graph break, with a window, forward and backward."""
    torch.compiler.reset()  # what other tests compiled
    model, counter = (
        decoder(num_hidden_layers=1, sliding_layers=None),
        CompileCounterWithBackend("aot_eager"),
    )
    model.layers["0"].compile(backend=counter, fullgraph=True)
    for several in (1, 3, 2, 40):
        tokens, documents = texts(several)
        compiled = model(tokens, cross_entropy_function(tokens), documents=documents)
        compiled.backward()
        with torch.compiler.set_stance("force_eager"):
            eager = model(tokens, cross_entropy_function(tokens), documents=documents)
        # the same operators, fused no further
        assert abs(float(compiled.detach()) / float(eager.detach()) - 1) < 1e-3
    assert counter.frame_count == 1
