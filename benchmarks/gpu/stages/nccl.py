"""NCCL with one rank: whether it starts, and every collective that dolmen calls, on a group of one
made by hand. What several ranks do needs several GPUs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu import clock, compare, house
from benchmarks.gpu.case import Case, Context, Record
from dolmen.core import collectives, transfers
from dolmen.core.mesh import Axis

DTYPES = (torch.float32, torch.bfloat16)
# Each function of core/collectives.py and core/transfers.py that sends, and by which calls below
# it is asked for.
COVERED = {
    "start_all_reduce": ("all-reduce, raw", "all-reduce max, raw"),
    "start_all_reduce_": ("all-reduce in place, raw",),
    "start_all_gather": ("all-gather, raw",),
    "start_reduce_scatter": ("reduce-scatter, raw",),
    "finish_reduce_scatter": ("reduce-scatter, raw",),
    "start_all_to_all": ("all-to-all, raw",),
    "wait": ("all-reduce, raw",),
    "start_send": ("send and receive",),
    "start_receive": ("send and receive",),
    "start_rotate": ("rotate",),
    "copy": ("copy",),
    "all_reduce_": ("all_reduce", "all_reduce_"),
    "all_gather": ("all_gather", "all_gather of columns"),
    "reduce_scatter": ("reduce_scatter",),
    "gather": ("gather",),
    "split": ("split",),
    "all_to_all": ("all_to_all",),
    "sum_": ("sum_",),
    "reduce_scalar": ("reduce_scalar",),
}


def cases(context: Context) -> Iterator[Case]:
    yield Case("start", 5, partial(start, context))
    yield Case("collectives", 5, partial(all_of_them, context))
    yield Case("large all-reduce", 5, partial(large, context))
    # last in its process: a batch that is refused half way leaves NCCL's open
    yield Case("to itself", 3, partial(to_itself, context), most=40)


def start(context: Context, record: Record) -> None:
    device = torch.device(context.place)
    with house.alone(device) as mesh:
        x = torch.arange(8.0, device=device)
        dist.all_reduce(x)
        dist.barrier()
        record.tell(backend=dist.get_backend(), mesh=str(mesh.grid))
        record.check("all-reduce", compare.unequal(x, torch.arange(8.0)), 0, "a sum of one")


def all_of_them(context: Context, record: Record) -> None:
    """Each gives back what it was given, and so does its backward: an axis of one rank that is made
    to send.
    """
    device = torch.device(context.place)
    with house.alone(device):
        axis = Axis("made", 1, 0, dist.group.WORLD, dist.get_backend() == "gloo")
        for dtype in DTYPES:
            x = torch.randn(6, 4, device=device).to(dtype)
            for name, call in calls(axis).items():
                given = x.clone().requires_grad_()
                try:
                    out = call(given)
                    if out.requires_grad:
                        out.backward(x)
                        off = compare.unequal(given.grad, x)
                        record.check(f"{name} backward {dtype}", off, 0, "one rank: nothing moves")
                    record.check(f"{name} {dtype}", compare.unequal(out, x), 0, "one rank")
                except RuntimeError as error:
                    record.tell(**{f"{name} {dtype}": str(error)})
                    record.check(f"{name} {dtype}", float("inf"), 0, "it runs")


def calls(axis: Axis) -> dict[str, Callable[[Tensor], Tensor]]:
    """What dolmen calls by name; the typed ones do nothing on an axis of one, so that what they
    would apply is applied.
    """
    c, plain = collectives, lambda f: lambda x: f(x.detach())
    return {
        "all-reduce, raw": plain(
            lambda x: transfers.wait(transfers.start_all_reduce(x, axis), axis)
        ),
        "all-reduce max, raw": plain(
            lambda x: transfers.wait(transfers.start_all_reduce(x, axis, "max"), axis)
        ),
        "all-reduce in place, raw": plain(
            lambda x: transfers.wait(transfers.start_all_reduce_(x.clone(), axis), axis)
        ),
        "all-to-all, raw": plain(
            lambda x: transfers.wait(transfers.start_all_to_all(x, None, None, axis), axis),
        ),
        "all-gather, raw": plain(
            lambda x: transfers.wait(transfers.start_all_gather(x, axis), axis)
        ),
        "reduce-scatter, raw": plain(
            lambda x: transfers.finish_reduce_scatter(transfers.start_reduce_scatter(x, axis), axis)
        ),
        "copy": lambda x: c._Copy.apply(x, axis),
        "all_reduce": lambda x: c._AllReduce.apply(x, axis),
        # of a tensor that is no leaf, as autograd asks of whatever is overwritten
        "all_reduce_": lambda x: c._AllReduceInPlace.apply(x * 1, axis),
        "all_gather": lambda x: c._AllGather.apply(x, 0, axis),
        "all_gather of columns": lambda x: c._AllGather.apply(x, 1, axis),
        "reduce_scatter": lambda x: c._ReduceScatter.apply(x, 0, axis),
        "gather": lambda x: c._Gather.apply(x, 0, axis),
        "split": lambda x: c._Split.apply(x, 0, axis),
        "all_to_all": lambda x: c._AllToAll.apply(x, [6], [6], axis),
        "sum_": plain(lambda x: c.sum_(x.clone(), replace(axis, size=2))),
        "reduce_scalar": plain(lambda x: c.reduce_scalar(x, replace(axis, size=2))),
    }


def to_itself(context: Context, record: Record) -> None:
    """What goes from one rank to another, from the one rank to itself: NCCL has that within one
    batch, gloo not at all. A refusal is told and is no failure; what arrives must be right.
    """
    device = torch.device(context.place)
    with house.alone(device):
        axis = Axis("made", 1, 0, dist.group.WORLD, dist.get_backend() == "gloo")
        for name, call in to_itself_calls(axis).items():
            x = torch.randn(6, 4, device=device)
            try:
                out = call(x)
            except RuntimeError as error:
                record.tell(**{name: f"not possible with one rank: {error}"})
                return  # the batch may still be open
            record.tell(**{name: "arrived"})
            record.check(name, compare.unequal(out, x), 0, "one rank")


def to_itself_calls(axis: Axis) -> dict[str, Callable[[Tensor], Tensor]]:
    # on a ring of two the rank two further is oneself
    ring = replace(axis, size=2)
    return {
        "rotate": lambda x: transfers.start_rotate([x], ring, shift=2).wait()[0],
        "send and receive": lambda x: _sent(x, axis),
    }


def _sent(x: Tensor, axis: Axis) -> Tensor:
    """Over NCCL in one batch, in which torch's calls give no work of their own."""
    into = torch.empty_like(x)
    if axis.gloo:
        works = [transfers.start_send(x, axis, 0), transfers.start_receive(into, axis, 0)]
    else:
        pair = (dist.isend, x), (dist.irecv, into)
        works = dist.batch_isend_irecv([dist.P2POp(f, t, 0, axis.group) for f, t in pair])
    for work in works:
        work.wait()
    return into


def large(context: Context, record: Record) -> None:
    """What NCCL takes for a gigabyte of which nothing leaves the device."""
    device = torch.device(context.place)
    x = torch.ones((1 << 30) // 4 if context.full else 1 << 10, device=device)
    with house.alone(device):
        record.tell(bytes=x.nbytes, **clock.timed(lambda: dist.all_reduce(x), device))
