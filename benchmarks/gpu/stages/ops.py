"""Each operator, its result and its gradients, beside its definition in float64 on fresh random
inputs; and how fast attention and experts' products are.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu import clock, compare, house, reference
from benchmarks.gpu.case import Case, Context, Record
from dolmen.core.mesh import Axis
from dolmen.model.spec.param import ParamSpecs, ShardSpec, column_parallel
from dolmen.model.split import single_process
from dolmen.ops import elementwise, norm, rope
from dolmen.ops.attention import Attend, decode
from dolmen.ops.attention.operators import attention_activated, is_installed
from dolmen.ops.attention.reference import KNOWN, ROADS, definition, errors
from dolmen.ops.attention_support import SUPPORT, AttentionName, find_lack
from dolmen.ops.elementwise import ACTIVATIONS
from dolmen.ops.kernels import Hardware, attention_needs
from dolmen.optim.config import OptimizerConfig
from dolmen.optim.optimizer import adamw
from dolmen.parallel.tensor import TensorParallel
from dolmen.parallel.vocabulary import linear_cross_entropy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
THETA = 10000.0
SPEED = {"plain": (None, 1), "window 1024": (1024, 1), "8 documents": (None, 8)}


def cases(context: Context) -> Iterator[Case]:
    for short, dtype in DTYPES.items():
        given = partial(_case, context, dtype)
        yield Case(f"product {short}", 2, given(product))
        for backend in backends(context, dtype):
            for road in ROADS:
                words = f"attention by {backend}, {road} {short}"
                yield Case(words, 3, partial(attention, context, backend, dtype, road))
        yield Case(f"attention, one query {short}", 1, given(one_query))
        for function in (rotate, rms_norm, layer_norm, activations, cross_entropy):
            yield Case(f"{function.__name__} {short}", 1, given(function))
        yield Case(f"grouped products {short}", 2, given(grouped))
    yield Case("dropout masks", 1, partial(masks, context))
    yield Case("AdamW", 1, partial(update, context))
    for name, (window, documents) in SPEED.items():
        yield Case(f"speed of attention, {name}", 4, partial(speed, context, window, documents))


class Given:
    """Random inputs on the device, the same every time, and how their results are held."""

    def __init__(self, context: Context, dtype: torch.dtype, record: Record):
        self.device, self.dtype, self.record = torch.device(context.place), dtype, record
        self.chance = torch.Generator().manual_seed(0)

    def draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=self.chance) * scale
        return x.to(self.device, self.dtype).requires_grad_()

    def hold(
        self, out: Tensor, true: Tensor, *inputs: Tensor, what: str = "", times: float = 2
    ) -> None:
        """`out` and its gradients beside `true` and its own, for a random gradient of the result;
        a gradient is rounded `times` as often as what forward gives.
        """
        bound, g = compare.BOUND[self.dtype], self.draw(*out.shape).detach().to(out.dtype)
        ours = torch.autograd.grad(out, inputs, g, retain_graph=True)
        theirs = torch.autograd.grad(true, inputs, g.double(), retain_graph=True)
        self.check(f"{what}forward", out, true, bound)
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            self.check(f"{what}gradient {i}", *pair, times * bound)

    def check(self, what: str, out: Tensor, true: Tensor, bound: float) -> None:
        self.record.check(what, compare.relative(out, true), bound, compare.WHY)


def _case(context: Context, dtype: torch.dtype, function: Callable, *sizes) -> Callable:
    return lambda record: function(Given(context, dtype, record), *sizes)


def product(given: Given) -> None:
    """TF32 would show here."""
    x, w = given.draw(300, 512), given.draw(512, 200)
    given.hold(x @ w, x.double() @ w.double(), x, w)


def backends(context: Context, dtype: torch.dtype) -> list[AttentionName]:
    """Those that the device and its software have for this dtype."""
    if not context.cuda:
        return ["blocks"]
    hardware = Hardware.from_device(torch.device(context.place))
    needs = attention_needs(hardware, dtype, 128)
    return [name for name in SUPPORT if not find_lack(name, needs) and is_installed(name)]


def attention(
    context: Context, backend: AttentionName, dtype: torch.dtype, road: str, record: Record
) -> None:
    """What each backend knows: whole sequences, pieces of a ring, gathered chunks."""
    device, bound = torch.device(context.place), compare.BOUND[dtype]
    with attention_activated(backend):
        for name, case in KNOWN[backend].items():
            for size in (64, 128) if context.full else (16,):
                off = errors(backend, replace(case, head_dim=size), dtype, device, road)
                for what, value in off.items():
                    most = bound if what == "out" else 2 * bound
                    record.check(f"{name}, {size}: {what}", value, most, compare.WHY)


def document_starts(length: int, documents: int) -> Tensor | None:
    """[1, length]: so many documents of one length."""
    if documents == 1:
        return None
    size = length // documents
    return (torch.arange(length) // size * size)[None]


def one_query(given: Given) -> None:
    """To whole keys, and to the same in pages of 7 tokens, as in a cache."""
    q, k, v = (given.draw(3, n, h, 64).detach() for n, h in ((1, 4), (77, 2), (77, 2)))
    true = definition(q.double(), k.double(), v.double())
    off = compare.relative(house.attention_of(q, k, v)(), true)
    given.record.check("forward", off, compare.BOUND[given.dtype], compare.WHY)
    page = torch.arange(33, device=given.device)
    back = 76 - page[:, None] % 11 * 7 - torch.arange(7, device=given.device)
    pools = (t.view(33, 7, 2, 64).transpose(1, 2).contiguous() for t in (k, v))
    found = decode.attend_pages(q[:, 0], *pools, Attend(), decode.Pages(page // 11, back))
    off = compare.relative(found[:, None], true)
    given.record.check("forward, in pages", off, compare.BOUND[given.dtype], compare.WHY)


def rotate(given: Given) -> None:
    x = given.draw(2, 500, 4, 64)
    inv = rope.inverse_frequencies(64, THETA, device=given.device)
    tables = rope.tables(torch.arange(500, device=given.device)[None], inv)
    given.hold(rope.rotate(x, *tables), reference.rotate(x, THETA), x)


def rms_norm(given: Given) -> None:
    x, weight = given.draw(300, 512), given.draw(512)
    true = reference.rms_norm(x, weight, 1e-5)
    for kind in house.norms(given.device, given.dtype):
        given.hold(norm.rms_norm(x, weight, 1e-5, kind), true, x, weight, what=f"{kind} ")


def layer_norm(given: Given) -> None:
    x, weight, bias = given.draw(300, 512), given.draw(512), given.draw(512)
    given.hold(
        F.layer_norm(x, (512,), weight, bias, 1e-5),
        reference.layer_norm(x, weight, bias, 1e-5),
        *(x, weight, bias),
        times=5,  # torch's kernel for a CPU adds up 300 rows in bf16: 0.022
    )


def activations(given: Given) -> None:
    for name, function in ACTIVATIONS.items():
        x = given.draw(300, 200, scale=3.0)
        given.hold(function(x), reference.activation(name, x), x, what=f"{name} ")


def cross_entropy(given: Given) -> None:
    """With labels that carry no loss, over a vocabulary of no round number."""
    x, weight = given.draw(200, 128), given.draw(1003, 128, scale=0.3)
    labels = torch.randint(1003, (200,), generator=given.chance).to(given.device)
    labels[::7] = -100
    tp = TensorParallel(Axis("tp"))
    out = linear_cross_entropy(x, weight, labels, 1003, tp)
    given.hold(out, reference.cross_entropy(x, weight, labels), x, weight)


def grouped(given: Given) -> None:
    """Groups of unequal numbers of rows, one of them empty."""
    counts = [64, 0, 7, 129, 40]
    x, weight = given.draw(sum(counts), 128), given.draw(5, 96, 128, scale=0.1)
    true = reference.grouped(x, weight, counts)
    for road, out in house.grouped(x, weight, counts).items():
        given.hold(out, true, x, weight, what=f"{road} ")


def masks(context: Context, record: Record) -> None:
    """What dropout keeps is the same on every device, bit for bit."""
    device = torch.device(context.place)
    for p in (0.1, 0.5):
        kept = [
            elementwise.keep(
                p,
                torch.tensor(12345, device=where),
                7,
                torch.arange(1000, device=where)[:, None],
                torch.arange(777, device=where),
            )
            for where in (device, torch.device("cpu"))
        ]
        record.check(f"p {p}", compare.unequal(*kept), 0, "integers alone")
        off = abs(float(kept[0].double().mean()) - (1 - p))
        record.check(f"share kept, p {p}", off, 5 * (p * (1 - p) / 777e3) ** 0.5, "5 sigma")


class Linear(nn.Linear):
    """A matrix and a vector with what the optimizer reads of a model."""

    split = single_process(1)

    def __init__(self):
        super().__init__(300, 200)

    def local_specs(self) -> ParamSpecs:
        return column_parallel(200, 300, True, ShardSpec("tp", 0, 200, "intermediate_size"))


def update(context: Context, record: Record) -> None:
    """Three updates of a matrix and a vector, beside algorithm 2 of 1711.05101 in float64."""
    device, c = torch.device(context.place), OptimizerConfig(lr=1e-2)
    torch.manual_seed(0)
    module = Linear()
    true = [p.detach().double() for p in module.parameters()]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in true]
    module.to(device)
    optimizer = adamw(module, c)
    for step in range(1, 4):
        for p, ref, (m, v) in zip(module.parameters(), true, moments, strict=True):
            g = torch.randn(p.shape)
            p.grad = g.to(device)
            m.mul_(c.beta1).add_((1 - c.beta1) * g.double())
            v.mul_(c.beta2).add_((1 - c.beta2) * g.double() ** 2)
            ref.mul_(1 - c.lr * (c.weight_decay if ref.ndim > 1 else 0))
            m_hat, v_hat = m / (1 - c.beta1**step), v / (1 - c.beta2**step)
            ref -= c.lr * m_hat / (v_hat.sqrt() + c.eps)
        optimizer.step()
    for p, ref in zip(module.parameters(), true, strict=True):
        off = compare.relative(p, ref)
        record.check(f"{p.ndim} dims", off, compare.BOUND[torch.float32], compare.WHY)


def speed(context: Context, window: int | None, documents: int, record: Record) -> None:
    """Forward and backward in bf16 at the sizes of an 8B model, by each backend and by SDPA's
    causal kernel; whether a backend's bits are the same again, and how its output differs from the
    first backend's.
    """
    device = torch.device(context.place)
    length, heads, kv = (4096, 32, 8) if context.full else (64, 4, 2)
    q, k, v = (
        torch.randn(1, length, h, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        for h in (heads, kv, kv)
    )
    starts = document_starts(length, documents)
    g = torch.randn_like(q)

    def both(function: Callable[[], Tensor]) -> Callable[[], None]:
        return lambda: torch.autograd.grad(function(), (q, k, v), g)

    def causal() -> Tensor:
        turned = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    causal_flops = 7 * heads * 128 * length * (length + 1)
    told, first = {}, None
    for backend in backends(context, torch.bfloat16):
        function = house.attention_of(q, k, v, Attend(window), starts, backend)
        with attention_activated(backend):
            once, again = (gradients(function, q, k, v, g) for _ in range(2))
            seconds = clock.rate(both(function), device)
            first = first or once
            told[backend] = {
                "forward": clock.rate(lambda function=function: function().detach(), device),
                "seconds": seconds,
                "causal_flops_per_second": causal_flops / seconds,
                "repeats": all(map(torch.equal, once, again)),
                "apart": compare.relative(once[0], first[0]),
                "same_bits": float((once[0] == first[0]).double().mean()),
            }
    record.tell(
        backends=told,
        rule=house.chosen_attention(q),
        sdpa=clock.rate(both(causal), device),
    )


def gradients(
    function: Callable[[], Tensor], q: Tensor, k: Tensor, v: Tensor, g: Tensor
) -> list[Tensor]:
    """[output, gradients of q, k and v] for the gradient g of the output."""
    out = function()
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), g)]
