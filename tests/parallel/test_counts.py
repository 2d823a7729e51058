"""What a step sends, counted on rank 0 of a fake process group of 8 (dp 2 x tp 4): operations,
bytes, and order.

Per layer means (3 layers) - (2 layers). Bytes are of the whole tensor that a collective gathers,
scatters or sums.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
import torch.distributed as dist
from backward import backward
from fakes import join_fake
from tiny_models import Flat, build, initialize, tiny, with_num_layers
from torch.utils._python_dispatch import TorchDispatchMode

from dolmen.core import mesh as meshes
from dolmen.core import state
from dolmen.model.head import cross_entropy_function
from dolmen.model.layout import Layout

DP, TP, BATCH, LENGTH, HIDDEN, FFN = 2, 4, 3, 8, 32, 48
TOKENS = BATCH * LENGTH  # 24: no parameter has a dim of 24, or a shape of an activation
SIZES = dict(
    vocab_size=71, hidden_size=HIDDEN, intermediate_size=FFN, num_attention_heads=8, head_dim=4
)
FAMILIES = {
    "llama": dict(num_key_value_heads=4),
    "qwen3": dict(num_key_value_heads=1, qk_norm=True),
    "gpt2": dict(
        num_key_value_heads=8,
        position="learned",
        norm="layernorm",
        mlp="plain",
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        max_position_embeddings=17,
    ),
}
FALCON = dict(hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=8, num_hidden_layers=1)
SIDE_BY_SIDE = {
    "falcon-7b": ("falcon", FALCON),
    "falcon-40b": ("falcon", FALCON | dict(new_decoder_architecture=True, num_kv_heads=4)),
}
Q_RANK, KV_RANK, ROPE = 20, 12, 4
DEEPSEEK = dict(
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_attention_heads=8,
    num_hidden_layers=1,
    kv_lora_rank=KV_RANK,
    qk_nope_head_dim=6,
    qk_rope_head_dim=ROPE,
    v_head_dim=7,
    first_k_dense_replace=1,
)
LATENT = {
    "deepseek-v2": ("deepseek_v2", DEEPSEEK | dict(q_lora_rank=None)),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK | dict(q_lora_rank=Q_RANK)),
}
OTHERS = SIDE_BY_SIDE | LATENT
SHORT = {
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_gather_into_tensor": "gather",
    "reduce_scatter_tensor": "scatter",
    "allreduce_": "all-reduce",
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "scatter",
}


@dataclass
class Sent:
    """One collective: of activations, or of a parameter (its gradient or copy), and the products
    computed before it was waited for.
    """

    kind: str
    bytes: int
    group: str
    backward: bool
    parameter: bool
    # shapes of products between issue and wait
    meanwhile: list[tuple[int, ...]] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Keeps every collective in order. Results are kept alive, so that identity means the same
    tensor.
    """

    def __init__(self, shapes: set[tuple[int, ...]]):
        super().__init__()
        self.shapes, self.sent, self.backward, self.open = shapes, [], False, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        name = op.__name__.split(".")[0]
        if (
            op.namespace == "c10d" and name in SHORT
        ):  # FSDP's: parameters and their gradients, over dp
            tensors = [
                t
                for a in args[:2]
                for t in (a if isinstance(a, list) else [a])
                if isinstance(t, torch.Tensor)
            ]
            self.sent.append(
                Sent(SHORT[name], max(t.nbytes for t in tensors), "dp", self.backward, True)
            )
        elif op.namespace == "_c10d_functional":
            if name in SHORT:
                sent = Sent(
                    SHORT[name],
                    max(args[0].nbytes, out.nbytes),
                    args[-1],
                    self.backward,
                    tuple(args[0].shape) in self.shapes,
                )
                self.sent.append(sent)
                self.open.append((out, sent))
            elif name == "_wrap_tensor_autograd":
                self.open += [(out, sent) for t, sent in self.open if t is args[0]]
            elif name == "wait_tensor":
                done = [id(sent) for t, sent in self.open if t is args[0]]
                self.open = [(t, sent) for t, sent in self.open if id(sent) not in done]
        elif name in ("mm", "addmm", "addmm_"):
            for sent in {id(sent): sent for _, sent in self.open}.values():
                sent.meanwhile.append(tuple(out.shape))
        return out


@pytest.fixture(scope="module", autouse=True)
def world():
    join_fake(DP * TP, 0)
    yield
    dist.destroy_process_group()


@cache
def trace(
    family: str, sequence: bool, layers: int, compute=torch.float32, vocab_size: int = 71
) -> list[Sent]:
    """Forward and backward of one microbatch, as rank 0 sends it."""
    if family in OTHERS:
        model_type, fields = OTHERS[family]
        one = tiny(model_type, vocab_size=vocab_size, **fields)
    else:
        one = Flat(**SIZES | FAMILIES[family] | dict(vocab_size=vocab_size, num_hidden_layers=1))
    config = with_num_layers(one, layers)
    mesh = meshes.build_mesh(DP, TP, torch.device("cpu"))
    model = build(config, mesh, Layout(sequence_parallel=sequence, zero=2), compute=compute)
    initialize(model, 0)
    # split over tp alone
    size = {
        p: tuple(s.stop - s.start for s in state.region(p))
        for p in build(config, mesh).parameters()
    }
    tokens = torch.arange(TOKENS).view(BATCH, LENGTH)
    with Recorder(set(size.values())) as recorder:
        loss = model(tokens, cross_entropy_function(tokens))
        recorder.backward = True
        backward(loss, model, last=True, zero=2)
    assert not recorder.open, "a collective was never waited for"
    activations = [s for s in recorder.sent if not s.parameter]
    assert {s.group for s in activations} == {mesh.tp.group.group_name}
    return recorder.sent


def tally(sent, **where) -> Counter:
    return Counter(
        (s.kind, s.bytes) for s in sent if all(getattr(s, k) == v for k, v in where.items())
    )


def per_layer(family, sequence, **options):
    """(forward, backward) tallies of activation collectives of one layer."""
    three, two = (trace(family, sequence, n, **options) for n in (3, 2))
    return tuple(
        tally(three, backward=b, parameter=False) - tally(two, backward=b, parameter=False)
        for b in (False, True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("compute", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_all_reduces_each_way(family, compute):
    whole = TOKENS * HIDDEN * compute.itemsize
    assert per_layer(family, False, compute=compute) == (
        Counter({("all-reduce", whole): 2}),
        Counter({("all-reduce", whole): 2}),
    )


@pytest.mark.parametrize("compute", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_sequence_parallelism(family, compute):
    """Two gathers and two scatters each way; backward gathers two inputs once more, since only
    their shards are kept.
    """
    whole = TOKENS * HIDDEN * compute.itemsize
    assert per_layer(family, True, compute=compute) == (
        Counter({("gather", whole): 2, ("scatter", whole): 2}),
        Counter({("gather", whole): 2 + 2, ("scatter", whole): 2}),
    )


@pytest.mark.parametrize("compute", (torch.float32, torch.bfloat16), ids=str)
def test_side_by_side_enters_and_leaves_together(compute):
    """One collective where two layers one after the other have two; with two norms there are two
    inputs, whose gradients are summed each.
    """
    whole = TOKENS * HIDDEN * compute.itemsize
    reduce, gather, scatter = (("all-reduce", whole), ("gather", whole), ("scatter", whole))
    for family, inputs in (("falcon-7b", 1), ("falcon-40b", 2)):
        assert per_layer(family, False, compute=compute) == (
            Counter({reduce: 1}),
            Counter({reduce: inputs}),
        )
        # backward gathers what came in once more, and the gradient of what left
        assert per_layer(family, True, compute=compute) == (
            Counter({gather: inputs, scatter: 1}),
            Counter({gather: inputs + 1, scatter: inputs}),
        )


def numbers(*widths: int) -> list[int]:
    """Bytes of so wide a tensor for all tokens, in fp32."""
    return [TOKENS * width * 4 for width in widths]


def test_latents_cross_and_not_the_residual_stream():
    """Attention without a latent of queries enters twice, with one thrice; what leaves is as wide
    as ever. The feed-forward layer has its own.
    """
    for family, q in (("deepseek-v2", HIDDEN), ("deepseek-v3", Q_RANK)):
        entering = numbers(q, KV_RANK, ROPE, HIDDEN)
        (whole,) = numbers(HIDDEN)
        assert per_layer(family, False) == (
            Counter({("all-reduce", whole): 2}),
            Counter(("all-reduce", n) for n in entering),
        )
        gathers, scatters = [("gather", n) for n in entering], [("scatter", n) for n in entering]
        forward, backward = per_layer(family, True)
        assert forward == Counter([*gathers, *[("scatter", whole)] * 2])
        # what came in by columns is gathered once more, for their weights; the rope key has none
        again = [("gather", n) for n in numbers(q, KV_RANK, HIDDEN)]
        assert backward == Counter([*again, *[("gather", whole)] * 2, *scatters])


@pytest.mark.parametrize("sequence", (False, True))
def test_side_by_side_overlaps_all_weight_gradients(sequence):
    """With one norm the sum of dx is under way while all of q, k, v and up have theirs computed."""
    last = [s for s in trace("falcon-7b", sequence, 1) if s.backward and not s.parameter]
    sums = [s.meanwhile for s in last if s.kind == ("scatter" if sequence else "all-reduce")][1:]
    head, q, f = HIDDEN // 8, HIDDEN // TP, FFN // TP
    assert sums == [[(rows, HIDDEN) for rows in (q, head, head, f)]]


@pytest.mark.parametrize("sequence", (False, True))
@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_and_loss(family, sequence):
    """Outside the layers: the embedding's sum, three numbers a token for the loss, and the head's
    input gradient.
    """
    whole, number = TOKENS * HIDDEN * 4, TOKENS * 4
    sent, layer = trace(family, sequence, 2), per_layer(family, sequence)
    outside = [
        tally(sent, backward=b, parameter=False) - layer[b] - layer[b] for b in (False, True)
    ]
    loss = Counter({("all-reduce", number): 1, ("all-reduce", 2 * number): 1})
    hidden = Counter(
        {("scatter", whole): 1, ("gather", whole): 1} if sequence else {("all-reduce", whole): 1}
    )
    assert outside == [hidden + loss, hidden]


@pytest.mark.parametrize("sequence", (False, True))
def test_loss_never_sends_the_vocabulary(sequence):
    small, large = (
        tally(trace("llama", sequence, 1, vocab_size=v), parameter=False) for v in (71, 7100)
    )
    assert small == large


@pytest.mark.parametrize("sequence", (False, True))
@pytest.mark.parametrize("family", FAMILIES)
def test_input_gradient_overlaps_weight_gradients(family, sequence):
    """In backward, the sum of dx is under way while all dW of its weights are computed, and the
    second gather of x while dx is.
    """
    # rows of this rank's weights
    f, q, kv = (FFN // TP, 8 * 4 // TP, {"llama": 4, "qwen3": 4, "gpt2": 8}[family])
    mlp, attention = [f] * (1 if family == "gpt2" else 2), [q, kv, kv]
    last = [s for s in trace(family, sequence, 1) if s.backward and not s.parameter]
    # the first is the head's
    sums = [s.meanwhile for s in last if s.kind == ("scatter" if sequence else "all-reduce")][1:]
    assert sums == [[(rows, HIDDEN) for rows in mlp], [(rows, HIDDEN) for rows in attention]]
    if sequence:  # per block: dy, needed at once, then x; last, the embedding's dy
        dx = (TOKENS, HIDDEN)
        assert [s.meanwhile for s in last if s.kind == "gather"] == [
            [],
            [dx] * len(mlp),
            [],
            [dx] * len(attention),
            [],
        ]


def test_only_the_shard_of_an_input_is_kept():
    """Under sequence parallelism no whole [tokens, hidden] is saved for backward, but the head's
    one gradient of its input.
    """
    whole, tokens = [], torch.arange(TOKENS).view(BATCH, LENGTH)
    mesh = meshes.build_mesh(DP, TP, torch.device("cpu"))
    for sequence in (False, True):
        model = build(
            Flat(**SIZES | FAMILIES["llama"] | dict(num_hidden_layers=3)),
            mesh,
            Layout(sequence_parallel=sequence, zero=0),
        )
        initialize(model, 0)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: (saved.append(tuple(t.shape)), t)[1], lambda t: t
        ):
            model(tokens, cross_entropy_function(tokens))
        whole.append(saved.count((TOKENS, HIDDEN)))
    assert whole[0] >= 1 + 3 * 2 and whole[1] == 1


def test_parameters_are_counted_apart():
    """Of parameters, a layer sends: over dp one gather forward and one scatter backward (ZeRO-2) of
    all its bytes; over tp, under sequence parallelism, the sums of its two norms' gradients.
    """
    three, two = (tally(trace("llama", True, n), parameter=True) for n in (3, 2))
    rank = (HIDDEN * HIDDEN * 2 + HIDDEN * 16 * 2 + HIDDEN * FFN * 3) // TP + 2 * HIDDEN
    assert three - two == Counter(
        {("gather", rank * 4): 1, ("scatter", rank * 4): 1, ("all-reduce", HIDDEN * 4): 2}
    )
