"""The self-test of exact numerics: before the first step each process computes the products of its
run, and parts of them by themselves, and compares bits.

Every run computes parts of the same products, cut between the same leaves (ops/numerics.py). If
each part that a run computes has the bits of its leaves computed alone, all runs have the same.
Whether it has them is decided by the library, its version, the CPU and the number of threads, from
shapes alone; so random numbers reveal it. Parts are computed on one thread: the number of threads
follows from the layout (launch/process.py), and with each number a product may agree with its own
parts. It takes about as long as the products of one layer, once more on one thread.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from dolmen.core import consensus
from dolmen.core.mesh import Axis, Mesh
from dolmen.model.attention import Attention, LatentAttention
from dolmen.model.spec import LatentAttentionSpec, ModelSpec
from dolmen.ops import invariant
from dolmen.ops.attention import Attend
from dolmen.ops.elementwise import Dropout, Noise
from dolmen.ops.numerics import Exact
from dolmen.parallel.context import ContextParallel


class ProductShape(NamedTuple):
    """A product [m, k] @ [k, n] of a run, and the leaf [leaf_m, k] @ [k, leaf_n] that every run
    with the same bits has as a part of it.
    """

    m: int
    k: int
    n: int
    leaf_m: int
    leaf_n: int
    transposed: str = ""
    """Factors that are stored transposed: "" (input gradient), "a" (weight gradient), "b" (output).
    """


def check_machine(
    spec: ModelSpec,
    exact: Exact,
    microbatch_size: int,
    mesh: Mesh,
    dtype: torch.dtype = torch.float32,
    generates: bool = False,
    dropout: float = 0.0,
) -> None:
    """Raise ValueError on every rank if any rank finds a product or an attention whose bits depend
    on the layout, computes on a GPU, or has a CPU that gives other bits than the first rank's.
    `dtype`: of compute. `generates`: single tokens are computed, too (rollouts). `dropout`: its
    probability. Collective.
    """
    shapes = product_shapes(spec, exact, microbatch_size, mesh.tp.size, mesh.cp.size)
    if generates:
        shapes += [shape._replace(leaf_m=1) for shape in shapes if shape.transposed == "b"]
    if mesh.device.type == "cpu":
        broken_product = find_broken_product(shapes, dtype) or find_broken_attention(
            spec, exact, microbatch_size, mesh.tp.size, dtype, dropout
        )
    else:
        broken_product = f"any sum: it computes on {mesh.device.type}"
    words = f"{broken_product}, with {torch.get_num_threads()} threads" if broken_product else None
    # one process has no peers to compare with, and perhaps no group
    gathered = consensus.gather_objects(words) if mesh.size > 1 else [words]
    for rank, broken in enumerate(gathered):
        if broken is not None:
            raise ValueError(
                f"train.numerics exact: rank {rank} has other bits in {broken}: set "
                "--train.device cpu and OMP_NUM_THREADS=1, or --train.numerics fast"
            )
    if mesh.size > 1:
        consensus.require_same(
            {
                "CPU capability": torch.backends.cpu.get_cpu_capability(),
                **{f"digest of {name}": value for name, value in digest_operators(dtype).items()},
            },
            "compute the same bits (train.numerics exact)",
            "use hosts with CPUs of one kind, or set --train.numerics fast",
        )


def digest_operators(dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Return operator -> digest of the bits that this CPU and its libraries compute for it from
    fixed random numbers, on one thread: a matrix product and attention in `dtype`, a sum and
    functions such as exp in fp32. Equal digests mean that two machines compute the same bits.
    """
    x = _random_matrix(64, 200, False)
    positive = x.abs() + 0.1
    functions = (torch.exp, torch.log, torch.rsqrt, torch.tanh, torch.erf, torch.cos, torch.sin)
    heads, whole = x.to(dtype).view(1, 50, 4, 64), ContextParallel(Axis("cp"))
    with invariant.one_thread():
        results = {
            "product": invariant.product(x.to(dtype), _random_matrix(200, 48, True, dtype)),
            "attention": torch.cat(_attention(heads, heads, heads, heads, Attend(), whole)),
            "sum": positive.sum(-1),
            **{function.__name__: function(positive) for function in functions},
        }
    return {
        name: hashlib.blake2b(result.float().numpy().tobytes(), digest_size=8).hexdigest()
        for name, result in results.items()
    }


def product_shapes(
    spec: ModelSpec, exact: Exact, microbatch_size: int, tp: int, cp: int = 1
) -> list[ProductShape]:
    """Return the shapes of the matrix products that a rank computes with each weight that tp splits
    (output, input gradient, weight gradient), each once, with the shape of the smallest part
    (leaf) whose bits must not depend on the layout. cp splits the tokens.
    """
    tokens, tokens_per_leaf = microbatch_size * exact.tokens // cp, exact.leaf
    leaves = exact.tp
    shapes = []
    for leaf in dict.fromkeys(spec.params.values()):
        if leaf.role == "head" or spec.head.tied and leaf == spec.params["embed.weight"]:
            # multiplied a leaf of tokens at a time
            out, block = -(-leaf.shape[0] // tp), exact.block(leaf.shape[0])
            shapes += _column_shapes(tokens_per_leaf, tokens_per_leaf, out, block, leaf.shape[1])
        elif leaf.role == "expert":
            _, out, inputs = leaf.shape
            for rows in (1, tokens_per_leaf):  # an expert has any number of a sequence's
                if leaf.shards[1].dim == 1:
                    shapes += _column_shapes(tokens, rows, out // tp, out // leaves, inputs)
                else:
                    shapes += _row_shapes(tokens, rows, out, inputs // tp, inputs // leaves)
        elif leaf.role == "matrix" and not leaf.shards:
            out, inputs = leaf.shape
            shapes += _column_shapes(tokens, exact.token_leaf, out, out, inputs)
        elif leaf.role == "matrix" and leaf.shards[0].dim == 0:
            out, inputs = leaf.shape
            shapes += _column_shapes(tokens, tokens_per_leaf, out // tp, out // leaves, inputs)
        elif leaf.role == "matrix":
            out, inputs = leaf.shape
            shapes += _row_shapes(tokens, tokens_per_leaf, out, inputs // tp, inputs // leaves)
    return list(dict.fromkeys(shapes))


def _column_shapes(
    tokens: int, tokens_per_leaf: int, out: int, leaf: int, inputs: int
) -> list[ProductShape]:
    """Return the three products (output, input gradient, weight gradient) of a rank's part [out,
    inputs] of a weight that tp splits over its outputs. Leaves have `tokens_per_leaf` of the
    `tokens` rows and `leaf` of the outputs.
    """
    return [
        ProductShape(tokens, inputs, out, tokens_per_leaf, leaf, "b"),
        ProductShape(tokens, leaf, inputs, tokens_per_leaf, inputs),
        ProductShape(out, tokens_per_leaf, inputs, leaf, inputs, "a"),
    ]


def _row_shapes(
    tokens: int, tokens_per_leaf: int, out: int, inputs: int, leaf: int
) -> list[ProductShape]:
    """Return the three products (output, input gradient, weight gradient) of a rank's part [out,
    inputs] of a weight that tp splits over its inputs. Leaves have `tokens_per_leaf` of the
    `tokens` rows and `leaf` of the inputs.
    """
    return [
        ProductShape(tokens, leaf, out, tokens_per_leaf, out, "b"),
        ProductShape(tokens, out, inputs, tokens_per_leaf, leaf),
        ProductShape(out, tokens_per_leaf, inputs, out, leaf, "a"),
    ]


def find_broken_product(
    shapes: Iterable[ProductShape], dtype: torch.dtype = torch.float32
) -> str | None:
    """Compute each product from random numbers in `dtype`, again on one thread, and its first and
    last leaf by themselves on one thread. Return a text about the first of these whose bits differ
    from the product's; None if all agree.
    """
    for shape in shapes:
        a = _random_matrix(shape.m, shape.k, "a" in shape.transposed, dtype)
        b = _random_matrix(shape.k, shape.n, "b" in shape.transposed, dtype)
        full = invariant.product(a, b)
        if not _equals_one_thread(a, b, full):
            return f"the product of {shape.m} x {shape.k} and {shape.k} x {shape.n} than one thread"
        for m, n in ((0, 0), (shape.m - shape.leaf_m, shape.n - shape.leaf_n)):
            rows, columns = slice(m, m + shape.leaf_m), slice(n, n + shape.leaf_n)
            if not _equals_one_thread(a[rows], b[:, columns], full[rows, columns]):
                return (
                    f"the product of {shape.m} x {shape.k} and {shape.k} x {shape.n} than in its "
                    f"part of {shape.leaf_m} x {shape.leaf_n}"
                )
    return None


def _equals_one_thread(a: Tensor, b: Tensor, want: Tensor) -> bool:
    """Return whether the product a @ b, computed on one thread, has the bits of `want`."""
    with invariant.one_thread():
        return torch.equal(invariant.product(a, b), want)


def _random_matrix(
    rows: int, columns: int, transposed: bool, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a random matrix [rows, columns] in `dtype`, the same at each call, stored by rows, or
    with `transposed` by columns.
    """
    generator = torch.Generator().manual_seed(0)
    if transposed:
        return torch.randn(columns, rows, generator=generator).to(dtype).t()
    return torch.randn(rows, columns, generator=generator).to(dtype)


def find_broken_attention(
    spec: ModelSpec,
    exact: Exact,
    microbatch_size: int,
    tp: int,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
) -> str | None:
    """Compute each of the model's attention layers, forward and gradients, from random numbers in
    `dtype`, with `dropout` of this probability: for a microbatch with a tp rank's heads, and for
    its last sequence and key-value head alone on one thread; over all chunks of the largest cp, as
    one process computes them. Return a text about the first whose bits differ; None if all agree.
    """
    context = ContextParallel(Axis("cp"), limit=exact.cp)
    for mixer in dict.fromkeys(block.mixer for block in spec.blocks):
        latent = isinstance(mixer, LatentAttentionSpec)
        heads = mixer.heads // tp
        kv_heads = heads if latent else mixer.kv_heads // tp
        group = heads // kv_heads
        generator = torch.Generator().manual_seed(0)
        size, value_size = mixer.head_sizes
        q, k, v, g = (
            torch.randn(microbatch_size, exact.tokens, *shape, generator=generator).to(dtype)
            for shape in (
                (heads, size),
                (kv_heads, size),
                (kv_heads, value_size),
                (heads, value_size),
            )
        )
        attend = LatentAttention.attend(mixer) if latent else Attention.attend(mixer)
        if dropout:
            noise = Noise(torch.tensor(1), torch.arange(microbatch_size))
            attend = attend._replace(dropout=Dropout(dropout, noise, torch.tensor(0)))
        full = _attention(q, k, v, g, attend, context)
        cut = (t[-1:, :, -n:] for t, n in zip((q, k, v, g), (group, 1, 1, group), strict=True))
        with invariant.one_thread():
            attend = attend._replace(first_head=heads - group)
            if attend.dropout is not None:
                noise = attend.dropout.noise
                noise = noise._replace(sequences=noise.sequences[-1:])
                attend = attend._replace(dropout=attend.dropout._replace(noise=noise))
            part = _attention(*cut, attend=attend, context=context)
        for rank_part, of_all in zip(part, full, strict=True):
            if not torch.equal(rank_part, of_all[-1:, :, -rank_part.shape[2] :]):
                return f"attention over {exact.tokens} tokens of {heads} heads than of {group}"
    return None


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    attend: Attend,
    context: ContextParallel,
) -> tuple[Tensor, ...]:
    """Return (output, gradients of q, k and v) of the attention `attend` on an axis of size 1, for
    a gradient g of the output.
    """
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    y = context.attention(q, k, v, attend)
    return y.detach(), *torch.autograd.grad(y, (q, k, v), g)
