"""Every private or version-dependent name of torch that the house uses is there and is what we take
it for: what a new release of torch is asked first.
"""

import ast
import inspect
import io
import logging
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fakes import join_fake
from torch import nn

HOUSE = Path(__file__).parents[2] / "dolmen/core/torch_private"
CLAIMS: dict[str, Callable[[], object]] = {}
# Names that another test is about
ELSEWHERE = {
    "strings.LAZY_GLOO": "tests/core/test_groups.py::test_a_lazy_group_has_few_sockets",
    "strings.DYNAMO": "tests/training/test_compiled.py::"
    "test_a_run_says_that_the_compiler_has_given_up",
    "strings.GAVE_UP": "tests/training/test_compiled.py::"
    "test_a_run_says_that_the_compiler_has_given_up",
    "hub.revert_weight_names": "tests/evaluation/test_verify.py::test_a_model_equals_transformers",
    "hub.observe_attention": "tests/comparison/test_diff.py::test_both_sides_are_seen_inside",
    "sharding.run_final_callback": "tests/golden/test_golden.py::"
    "test_layout_never_changes_the_answer",  # its rows of zero-bubble
    "sharding.gathered_copy": "tests/golden/test_exact.py::"
    "test_every_layout_has_the_bits_of_one_process",
    "sharding.widen_gradient": "tests/golden/test_exact.py::"
    "test_every_layout_has_the_bits_of_one_process_in_bf16",
    "sharding.gather_as": "tests/golden/test_eight_bits.py::"
    "test_payloads_that_are_gathered_change_no_bit",
}


def claim(*names: str):
    """What the function, which raises where it is not so, says of these names."""

    def keep(function: Callable[[], object]):
        CLAIMS.update(dict.fromkeys(names, function))
        return function

    return keep


def private(name: str):
    """`compute.rms_norm`, looked up when it is asked for: what is missing is one failure."""
    file, name = name.split(".")
    return getattr(import_module(f"dolmen.core.torch_private.{file}"), name)


def arguments(operator) -> str:
    return " ".join(a.name for a in operator.default._schema.arguments)


@claim("compute.flash_forward", "compute.flash_backward")
def _():
    forward, backward = private("compute.flash_forward"), private("compute.flash_backward")
    call = "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
    more = "scale window_size_left window_size_right"
    assert arguments(forward).startswith(f"query key value {call} return_debug_mask {more}")
    tensors = "grad_out query key value out logsumexp"
    assert arguments(backward) == f"{tensors} {call} rng_state unused {more}"
    assert [len(o.default._schema.returns) for o in (forward, backward)] == [5, 3]


@claim("compute.cudnn_forward", "compute.cudnn_backward")
def _():
    forward, backward = private("compute.cudnn_forward"), private("compute.cudnn_backward")
    call = "attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale"
    assert arguments(forward) == f"query key value {call}"
    tensors = "grad_out query key value out logsumexp philox_seed philox_offset attn_bias"
    rest = "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal scale"
    assert arguments(backward) == f"{tensors} {rest}"


@claim("compute.rms_norm", "compute.rms_norm_backward")
def _():
    x, weight = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    normal, scale = private("compute.rms_norm")(x, weight.shape, None, 1e-5)
    torch.testing.assert_close(normal * weight, F.rms_norm(x, [5], weight, 1e-5))
    torch.testing.assert_close(scale, (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt())
    backward = private("compute.rms_norm_backward")
    assert arguments(backward) == "grad_out input normalized_shape rstd weight output_mask"


@claim("compute.transpose_contiguous")
def _():
    """Compiled, what is multiplied lies as it was asked for, and not as the compiler likes."""
    from torch._inductor.utils import run_and_get_code

    x, y = torch.randn(96, 64), torch.randn(96, 32)
    compiled = torch.compile(lambda x, y: private("compute.transpose_contiguous")(x) @ y)
    product, (code,) = run_and_get_code(compiled, x, y)
    torch.testing.assert_close(product, x.t() @ y)
    assert "(64, 96), (96, 1)" in code and "(64, 96), (1, 64)" not in code
    assert private("compute.transpose_contiguous")(x).is_contiguous()


@claim("compute.prepack_weight", "compute.prepacked_linear")
def _():
    x, weight, bias = torch.randn(5, 96), torch.randn(64, 96), torch.randn(64)
    prepacked, product = private("compute.prepack_weight"), private("compute.prepacked_linear")
    got = product(x, prepacked(weight, 16), bias)  # fp32 alone: of bf16 a CPU with AVX2 has none
    torch.testing.assert_close(got, F.linear(x, weight, bias), atol=1e-4, rtol=0)


@claim("compute.int8_product")
def _():
    x, scale = torch.randn(5, 96).bfloat16(), torch.rand(64).bfloat16()
    weight = torch.randint(-127, 128, (64, 96), dtype=torch.int8)
    exact = x.double() @ (weight.double() * scale.double()[:, None]).t()
    got = private("compute.int8_product")(x, weight, scale).double()
    torch.testing.assert_close(got, exact, atol=1e-2 * float(exact.abs().max()), rtol=0)


@claim("compute.prepack_integers", "compute.multiply_integers", "compute.has_integer_product")
def _():
    """Small enough that a CPU without VNNI is exact too."""
    assert private("compute.has_integer_product")()
    x = torch.randint(100, 156, (5, 96), dtype=torch.uint8)
    weight, scale = torch.randint(-60, 60, (64, 96), dtype=torch.int8), torch.rand(64)
    prepacked, zeros = (
        private("compute.prepack_integers")(weight),
        torch.zeros(64, dtype=torch.int32),
    )
    got = private("compute.multiply_integers")(x, prepacked, scale, zeros, 128)
    assert torch.equal(got, (x.int() - 128).float() @ weight.float().t() * scale)


@claim("compute.softmax_backward")
def _():
    x = torch.randn(3, 5, requires_grad=True)
    y, g = x.softmax(-1), torch.randn(3, 5)
    got = private("compute.softmax_backward")(g, y.detach(), -1, torch.float32)
    torch.testing.assert_close(got, torch.autograd.grad(y, x, g)[0])


@claim("compute.foreach_add", "compute.foreach_add_", "compute.foreach_mul_")
@claim("compute.foreach_norm")
def _():
    xs = [torch.ones(2), torch.full((3,), 2.0)]
    assert private("compute.foreach_add")(xs, xs, alpha=2)[1].tolist() == [6.0] * 3
    private("compute.foreach_add_")(xs, xs)
    private("compute.foreach_mul_")(xs, torch.tensor(0.5))
    private("compute.foreach_mul_")(xs, 3)
    assert xs[0].tolist() == [3.0] * 2
    assert private("compute.foreach_norm")(xs)[1].item() == pytest.approx(108**0.5)


@claim("compute.is_profiling")
def _():
    profiles = private("compute.is_profiling")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert profiles()
    assert not profiles()


@claim("compute.has_fast_bfloat16", "compute.has_amx")
def _():
    fast, tiles = private("compute.has_fast_bfloat16")(), private("compute.has_amx")()
    assert isinstance(fast, bool) and isinstance(tiles, bool) and fast >= tiles


@claim("compute.can_prepack")
def _():
    assert private("compute.can_prepack")() == torch.backends.mkldnn.is_available()


@claim("compute.find_compiler")
def _():
    """The first of those that torch is set to look for that is there."""
    from torch._inductor import config

    find = private("compute.find_compiler")
    with config.patch({"cpp.cxx": ("no-such-compiler", sys.executable)}):
        assert find() == sys.executable
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert find() == ""


@claim("compute.version_of")
def _():
    """Of what is written through a view too."""
    x = torch.zeros(2)
    writes = private("compute.version_of")
    before = writes(x)
    x[0] = 1
    assert writes(x) > before


@claim("compute.mark_dynamic", "compute.disable_compile")
def _():
    """Of a size that is marked there is one program for all; what is untraced is in none."""
    programs, seen = [], []
    mark, tell = (
        private("compute.mark_dynamic"),
        lambda x: seen.append(torch.compiler.is_compiling()),
    )
    untraced = private("compute.disable_compile")(tell)

    @torch.compile(backend=lambda graph, _: programs.append(graph) or graph.forward)
    def function(x):
        y = x + x.shape[0]
        untraced(y)
        return y

    for n in (4, 5, 6):
        x = torch.ones(n)
        mark(x, 0)
        assert function(x).tolist() == [1.0 + n] * n
    assert len(programs) == 1 and seen == [False] * 3


@claim("compute.ViewAdamW")
def _():
    seen = []

    class Viewed(private("compute.ViewAdamW")):
        @staticmethod
        def view(x):
            seen.append(x)
            return x

    ends = []
    for rule in (Viewed, torch.optim.AdamW):
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.tensor([1.0, -2.0, 3.0])
        rule([p], lr=0.1, fused=True).step()
        ends.append(p.detach())
    assert torch.equal(*ends)
    assert len(seen) == 5  # the parameter, its gradient, two moments and the step


@contextmanager
def alone():
    """A process group of gloo, of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@claim("processes.all_reduce", "processes.all_reduce_", "processes.all_gather")
@claim("processes.reduce_scatter", "processes.all_to_all", "processes.wait")
def _():
    """Signatures, and whose memory: sums are tests/parallel/test_collectives.py's."""
    with alone() as group:
        wait, x = private("processes.wait"), torch.arange(6.0).view(2, 3)
        for out in (
            private("processes.all_reduce")(x, "sum", group),
            private("processes.all_gather")(x, 0, group),
            private("processes.reduce_scatter")(x, "sum", 0, group),
            private("processes.all_to_all")(x, [2], [2], group),
            private("processes.all_to_all")(x, None, None, group),
        ):
            assert torch.equal(wait(out), x) and wait(out).data_ptr() != x.data_ptr()
        out = wait(private("processes.all_reduce_")(x, "sum", group.group_name))
        assert out.data_ptr() == x.data_ptr()


@claim("processes.groups", "processes.backends", "processes.store", "processes.Store")
def _():
    with alone() as group:
        store = private("processes.store")("dolmen's test")
        assert isinstance(store, private("processes.Store"))
        assert store.add("counter", 2) == 2 and store.add("counter", 0) == 2
        assert (group, [0]) in list(private("processes.groups")())
        assert "gloo" in private("processes.backends")(group)


@claim("processes.set_timeout")
def _():
    options = dist.ProcessGroupGloo._Options()  # NCCL's, which a CPU build lacks, is of its class
    private("processes.set_timeout")(options, timedelta(seconds=7))
    assert options._timeout == timedelta(seconds=7)


@contextmanager
def mesh_of_two():
    """Rank 0 of a mesh of two, in which nothing is sent."""
    join_fake(2)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


@claim("dispatch.Fake", "dispatch.Dispatch")
def _():
    """A tensor without values has a storage of its size on its device, and operators are told."""
    seen = []

    class Seeing(private("dispatch.Dispatch")):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            seen.append(str(operator.overloadpacket))
            return operator(*args, **(kwargs or {}))

    with private("dispatch.Fake")(allow_non_fake_inputs=True), Seeing():
        x = torch.ones(2**40) + torch.zeros(1)
    assert x.untyped_storage().nbytes() == 2**42 and x.device.type == "cpu"
    assert seen == ["aten.ones", "aten.zeros", "aten.add"]


@claim("dispatch.join_fake", "dispatch.completed_work", "dispatch.Arriving")
def _():
    """Of a fake group nothing that is sent is ever complete, and what its functional collectives
    give is a wrapper.
    """
    join_fake(4, 2)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (2, 4)
        x = torch.zeros(3)
        assert not dist.isend(x, 0).is_completed()
        assert dist.Work.unbox(private("dispatch.completed_work")()).is_completed()
        y = private("processes.all_reduce")(x, "sum", dist.group.WORLD)
        assert type(y) is private("dispatch.Arriving")
    finally:
        dist.destroy_process_group()


@claim("dispatch.next_sequence_number", "dispatch.backward_sequence_number")
def _():
    """Nodes are numbered as forward makes them, and backward knows at which it is."""
    found = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            found.append(private("dispatch.backward_sequence_number")())
            return g

    number = private("dispatch.next_sequence_number")
    x, first = torch.zeros(2, requires_grad=True), number()
    between = Node.apply(x), number()
    last = Node.apply(between[0])
    last.sum().backward()
    assert first <= found[1] < between[1] <= found[0] < number()
    assert private("dispatch.backward_sequence_number")() is None


@claim("dispatch.observe_resizes")
def _():
    seen, x = [], torch.zeros(4)
    with private("dispatch.observe_resizes")(lambda storage: seen.append(storage.nbytes())):
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(32)
    x.untyped_storage().resize_(16)
    assert seen == [0, 32]


@claim("sharding.local_shape_and_offset", "sharding.local_tensor", "sharding.dtensor_like")
def _():
    tensors = import_module("torch.distributed.tensor")
    with mesh_of_two() as mesh:
        places = [tensors.Shard(0)]
        shape, offset = private("sharding.local_shape_and_offset")(torch.Size([5, 2]), mesh, places)
        assert (tuple(shape), tuple(offset)) == ((3, 2), (0, 0))
        mine = torch.randn(3, 2)
        p = tensors.DTensor.from_local(
            mine, mesh, places, run_check=False, shape=torch.Size([5, 2]), stride=(2, 1)
        )
        assert private("sharding.local_tensor")(p).data_ptr() == mine.data_ptr()
        other = private("sharding.dtensor_like")(p, torch.zeros(3, 2))
        assert (
            type(other) is type(p) and other.shape == p.shape and other.placements == p.placements
        )
        assert private("sharding.local_tensor")(other).count_nonzero() == 0


@claim("sharding.Record", "sharding.records", "sharding.gather_plain")
@claim("sharding.replicate", "sharding.ranks", "sharding.gathered_shape")
def _():
    """A unit of FSDP has a record of each parameter, and knows its ranks. Of one that tp has split
    it gathers a plain tensor once it is told to: what backward does with its gradient is
    tests/parallel/test_bridge's.
    """
    fsdp, tensors = (import_module(f"torch.distributed.{n}") for n in ("fsdp", "tensor"))
    join_fake(4)
    try:
        grid = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        for shard in (fsdp.fully_shard, private("sharding.replicate")):
            unit = torch.nn.Linear(4, 4)
            split = tensors.DTensor.from_local(
                unit.weight[:2].detach(), grid["tp"], [tensors.Shard(0)]
            )
            unit.weight = torch.nn.Parameter(split)
            shard(unit, mesh=grid["fsdp"], mp_policy=fsdp.MixedPrecisionPolicy())
            assert isinstance(unit, fsdp.FSDPModule)
            records = private("sharding.records")(unit)
            assert all(type(record) is private("sharding.Record") for record in records)
            names = {id(p): name for name, p in unit.named_parameters()}
            (weight,) = (r for r in records if names[id(r.sharded_param)] == "weight")
            assert [r.is_dtensor for r in records if r is not weight] == [False]
            assert callable(weight._get_grad_inner_tensor) and weight.is_dtensor
            private("sharding.gather_plain")(weight, lambda g: g)
            assert private("sharding.ranks")(weight) == (2 if shard is fsdp.fully_shard else 1)
            assert private("sharding.gathered_shape")(weight) == (2, 4)
            unit.unshard()
            assert type(unit.weight.data) is torch.Tensor and unit.weight.shape == (2, 4)
    finally:
        dist.destroy_process_group()


@claim("sharding.ReduceScatter")
def _():
    """That it is called, and by what, is tests/golden/test_reduction.py's."""
    called = inspect.signature(private("sharding.ReduceScatter").__call__)
    assert list(called.parameters)[1:] == [
        "output_tensor",
        "input_tensor",
        "group",
        "op",
        "async_op",
    ]
    made = inspect.signature(private("sharding.ReduceScatter").allocate)
    assert list(made.parameters)[1:] == ["size", "dtype", "device"]


@claim("sharding.One")
def _():
    """And `replicate` divides by it where it divides at all: tests/parallel/test_bridge.py."""
    x = torch.ones(2)
    assert x / private("sharding.One")(1.0) is x


@claim("checkpoints.Place")
def _():
    place = private("checkpoints.Place")("a", 1, 2)
    assert (place.relative_path, place.offset, place.length) == ("a", 1, 2)


@claim("checkpoints.PICKLED")
def _():
    """Each is found, and what DCP pickles of a tensor names no other."""
    for module, name in private("checkpoints.PICKLED"):
        assert hasattr(import_module(module), name), f"{module}.{name}"
    dcp = import_module("torch.distributed.checkpoint.metadata")
    chunk = dcp.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    tensor = dcp.TensorStorageMetadata(
        dcp.TensorProperties.create_from_tensor(torch.ones(2)), torch.Size([2]), [chunk]
    )
    index = dcp.MetadataIndex("x", torch.Size([0]))
    place = private("checkpoints.Place")("a", 1, 2)
    written = pickle.dumps(dcp.Metadata({"x": tensor}, storage_data={index: place}))
    named = set()

    class Watched(pickle.Unpickler):
        def find_class(self, module, name):
            named.add((module, name))
            return super().find_class(module, name)

    Watched(io.BytesIO(written)).load()
    assert named <= private("checkpoints.PICKLED") | {("torch", "float32")}


@claim("checkpoints.NUMBERS")
def _():
    file = io.BytesIO()
    torch.save(torch.arange(5.0), file)
    with zipfile.ZipFile(file) as archive:
        (found,) = (e for e in archive.infolist() if private("checkpoints.NUMBERS") in e.filename)
        assert found.compress_type == zipfile.ZIP_STORED
        assert archive.read(found) == torch.arange(5.0).numpy().tobytes()


def source(module: str) -> str:
    return inspect.getsource(import_module(module))


@claim("checkpoints.TENSORS", "checkpoints.PARAMETERS", "checkpoints.rebuild")
def functions_that_pickles_name():
    tensors, parameters = private("checkpoints.TENSORS"), private("checkpoints.PARAMETERS")
    named = {
        (one.__module__, one.__name__)
        for value in (torch.ones(2), torch.ones(2, dtype=torch.uint16), nn.Parameter(torch.ones(2)))
        for one in (value.__reduce_ex__(2)[0],)
    }
    assert ("torch._utils", "_rebuild_parameter") in named
    assert named <= tensors | parameters | {("torch._tensor", "_rebuild_from_type_v2")}
    made = private("checkpoints.rebuild")
    assert (made.__module__, made.__name__) in tensors
    for module, name in tensors | parameters:
        first = list(inspect.signature(getattr(import_module(module), name)).parameters)[:4]
        known = ["storage", "storage_offset", "size", "stride"]
        assert first == known if (module, name) in tensors else first[0] == "data", name


@claim("checkpoints.MAGIC")
def what_files_before_torch_1_6_begin_with():
    assert private("checkpoints.MAGIC") == torch.serialization.MAGIC_NUMBER


@claim("strings.RESTARTS", "strings.RUN", "strings.ONE_STORE")
def _():
    agent = source("torch.distributed.elastic.agent.server.local_elastic_agent")
    for name in ("RESTARTS", "RUN", "ONE_STORE"):
        assert private(f"strings.{name}") in agent


@claim("strings.REDISTRIBUTE")
def _():
    name = private("strings.REDISTRIBUTE")
    assert logging.getLogger(name) is import_module(name).logger


@claim("strings.TORCH", "strings.COLLECTIVES")
def _():
    assert private("strings.TORCH") in torch.__file__
    for waits in (dist.all_reduce, dist.barrier, private("processes.wait")):
        assert private("strings.COLLECTIVES") in inspect.unwrap(waits).__code__.co_filename


@claim("strings.COMPILED")
def _():
    assert private("strings.COMPILED") in source("torch._inductor.output_code")


@claim("strings.FSDP")
def _():
    assert private("strings.FSDP") in source(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group"
    )


# the compiler asks who compiles C++ here
STARTS = dict.fromkeys(["compute.transpose_contiguous", "compute.find_compiler"], pytest.mark.spawn)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=STARTS.get(name, ())) for name in CLAIMS]
)
def test_it_is_what_we_take_it_for(name):
    try:
        CLAIMS[name]()
    except Exception as error:
        pytest.fail(
            f"torch {torch.__version__}: dolmen.core.torch_private.{name} is not what the house "
            f"takes it for: {type(error).__name__}: {error}"
        )


def described() -> dict[str, str]:
    """Names that the files give, and what is said of them."""
    found = {}
    for path in sorted(HOUSE.glob("*.py")):
        body = ast.parse(path.read_text()).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[f"{path.stem}.{node.name}"] = ast.get_docstring(node) or ""
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                said = after.value if isinstance(after, ast.Expr) else None
                text = said.value if isinstance(said, ast.Constant) else ""
                found[f"{path.stem}.{node.targets[0].id}"] = text
    return {n: text for n, text in found.items() if not n.split(".")[1].startswith("_")}


def test_each_name_has_a_test_and_says_why_and_of_which_releases():
    names = described()
    tested = {*CLAIMS, *ELSEWHERE}
    untested = names.keys() - tested - {"compute.P", "compute.T"}
    assert not untested and not tested - names.keys(), (untested, tested - names.keys())
    for name in tested:
        assert re.search(r"\d\.\d|All releases", names[name]), f"{name}: since which release?"


def test_the_tests_elsewhere_are_there():
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (HOUSE.parents[2] / file).read_text(), test


@pytest.mark.full
def test_nothing_imports_the_compiler():
    """It takes half a second, which each process of a run would wait."""
    code = "import sys, dolmen.training.run; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
