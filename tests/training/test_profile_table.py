"""The kinds of a step, on hand-made events of a GPU (with names from traces of torch 2.11) and
of a CPU.
"""

import pytest
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import DeviceType

from dolmen.training.profile_table import (
    ATTENTION,
    COLLECTIVES,
    COPIES,
    ELEMENTWISE,
    EXPERTS,
    IDLE,
    LOSS,
    NORMS,
    OPTIMIZER,
    OTHER,
    PRODUCTS,
    STEP,
    WAITING,
    KindRow,
    ProfileTable,
    tabulate,
)


def op(name, ts, dur, tid=1, sequence=-1, annotation=False):
    return FunctionEvent(
        0, name, tid, ts, ts + dur, sequence_nr=sequence, is_user_annotation=annotation
    )


def mark(name, ts, dur, tid=1):
    return op(name, ts, dur, tid, annotation=True)


def kernel(name, ts, dur, at=None, tid=1):
    """A kernel, launched at `at` by thread `tid`; by nothing known where that is None."""
    event = FunctionEvent(0, name, 7, ts, ts + dur, device_type=DeviceType.CUDA)
    event.launch = None if at is None else (tid, at)  # pyright: ignore[reportAttributeAccessIssue]
    return event


def recorded(events) -> EventList:
    """The events as torch.profiler gives them: in a tree, kernels under what launched them."""
    out = EventList(sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end)))
    out._build_tree()
    for event in [e for e in out if getattr(e, "launch", None)]:
        tid, at = event.launch  # pyright: ignore[reportAttributeAccessIssue]
        around = [
            e
            for e in out
            if e.device_type == DeviceType.CPU
            and e.thread == tid
            and e.time_range.start <= at < e.time_range.end
        ]
        operators = [e for e in around if not e.is_user_annotation]
        for e in (*operators[-1:], *around[-1:]):  # a range repeats its kernels
            e.append_kernel(event.name, 0, event.time_range.elapsed_us())
    return out


NVJET = "nvjet_tst_128x256_64x4_2x1_v_bz_coopB_TNN"
FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>(Flash_fwd_params)"
)
COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>>(int)"
)
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def gpu() -> list[FunctionEvent]:
    """A step of 1,000 us; forward on thread 1, backward on thread 2."""
    return [
        mark("dolmen: step", 1000, 1000),
        # before the step
        kernel(NVJET, 900, 50, at=890),
        # a norm, whose operators' names would say elementwise
        mark("dolmen: norm", 1010, 20),
        op("_RMSNorm", 1011, 18, sequence=1),
        op("aten::mul", 1012, 5),
        kernel(POINTWISE, 1020, 30, at=1014),
        # a product, which needs a copy
        op("aten::linear", 1040, 20, sequence=2),
        op("aten::mm", 1042, 15, sequence=2),
        op("aten::copy_", 1043, 5),
        kernel(COPY, 1060, 20, at=1044),
        kernel(NVJET, 1080, 100, at=1050),
        kernel("void splitKreduce_kernel<32, 16, int>", 1180, 10, at=1052),
        # attention; its softmax is attention's
        mark("dolmen: attention", 1070, 20),
        op("aten::scaled_dot_product_attention", 1071, 15, sequence=3),
        op("aten::_softmax", 1072, 10, sequence=3),
        kernel("softmax_warp_forward", 1190, 40, at=1074),
        # an all-reduce over tp, behind which 60 of 100 us a product runs, on another stream
        mark("dolmen: tp all-reduce", 1100, 10),
        op("_c10d_functional::all_reduce", 1101, 8),
        kernel(REDUCE, 1230, 100, at=1103),
        op("aten::mm", 1115, 5),
        kernel(NVJET, 1230, 60, at=1117),
        # FSDP's, of a block and of its experts
        mark("FSDP::all_gather (layers.0)", 1125, 10),
        op("c10d::_allgather_base_", 1126, 5),
        kernel(GATHER, 1330, 20, at=1128),
        mark("FSDP::all_gather (layers.0.mlp.experts)", 1136, 8),
        op("c10d::_allgather_base_", 1137, 5),
        kernel(GATHER, 1350, 10, at=1138),
        # compiled: a kernel whose launch says nothing but where
        mark("Torch-Compiled Region: 0/0", 1150, 30),
        op("## Call CompiledFxGraph fabc ##", 1151, 28),
        kernel("triton_poi_fused_mul_silu_0", 1360, 15, at=1155),
        kernel("triton_red_fused__to_copy_mean_rsqrt_1", 1375, 5, at=1160),
        # the loss: its product is a product
        mark("dolmen: loss", 1190, 30),
        op("_LinearCrossEntropy", 1191, 28, sequence=4),
        op("aten::mm", 1192, 4),
        kernel(NVJET, 1380, 50, at=1193),
        op("aten::exp_", 1198, 4),
        kernel(POINTWISE, 1430, 20, at=1199),
        # backward, on another thread: attention's by its sequence number
        op(
            "autograd::engine::evaluate_function: SoftmaxBackward0",
            1300,
            20,
            2,
            sequence=3,
        ),
        op("aten::_softmax_backward_data", 1302, 10, 2),
        kernel("softmax_warp_backward", 1500, 70, at=1304, tid=2),
        # computed again, in a range of its own
        op("autograd::engine::evaluate_function: MulBackward0", 1330, 60, 2),
        mark("dolmen: recompute", 1335, 30, 2),
        op("aten::mm", 1340, 10, 2),
        kernel(NVJET, 1600, 80, at=1342, tid=2),
        op("aten::sort", 1395, 10, 2),
        kernel("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>", 1700, 12, 1398, 2),
        # experts, whichever way they are computed
        mark("dolmen: experts", 1410, 30),
        op("aten::mm", 1411, 10),
        kernel(NVJET, 1720, 40, at=1412),
        op("aten::_grouped_mm", 1450, 10),
        kernel("void cutlass::device_kernel<GroupProblemShape>", 1760, 20, at=1452),
        # the update
        mark("dolmen: optimizer update", 1500, 40),
        op("aten::_fused_adamw_", 1505, 30),
        kernel("void multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", 1800, 100, at=1510),
        # a copy to the device that nothing else explains; and half of it after the step
        kernel("Memcpy HtoD (Pageable -> Device)", 1990, 20, at=1600),
        # as a trace has them: no time of anybody's
        kernel("dolmen: attention", 1190, 40),
    ]


def table(events):
    return tabulate(recorded(events))[0]


def test_the_step_is_the_hosts_and_not_where_its_kernels_ran():
    assert tabulate(recorded([kernel(STEP, 1100, 500), *gpu()])) == tabulate(recorded(gpu()))


WANT = {  # microseconds
    NORMS: 30 + 5,
    COPIES: 20 + 10,
    PRODUCTS: 100 + 10 + 60 + 50 + 80,
    ATTENTION: 40 + 70,
    "collectives tp": 40,
    "collectives fsdp": 20,
    "collectives edp": 10,
    ELEMENTWISE: 15,
    LOSS: 20,
    OTHER: 12,
    EXPERTS: 60,
    OPTIMIZER: 100,
}


def test_kernels_are_of_what_launched_them_and_kinds_add_up():
    found = table(gpu())
    got = {row.kind: 1e6 * row.seconds for row in found.rows}
    assert got.pop(IDLE) == pytest.approx(1000 - sum(WANT.values()))
    assert got == pytest.approx(WANT)
    assert found.gpu and found.seconds == pytest.approx(1e-3)
    assert sum(row.seconds for row in found.rows) == pytest.approx(found.seconds, rel=1e-12)
    assert 1e6 * found.recomputed == pytest.approx(80)
    assert found.rows[0].kind == PRODUCTS  # the longest first


def test_what_hides_behind_computing_is_told_beside():
    rows = {row.kind: row for row in table(gpu()).rows}
    tp = rows["collectives tp"]
    assert 1e6 * tp.busy == pytest.approx(100) and tp.calls == 1
    assert rows[PRODUCTS].calls == 5  # that of the step before is not in it
    text = table(gpu()).lines()
    assert text[0].split() == "matrix products 30.0 % 0.3 ms 5 calls".split()
    (line,) = [line for line in text if line.startswith("collectives tp")]
    assert line.endswith("1 calls")  # 0.06 ms is not worth a word
    assert "of these 0.1 ms were recomputation of forward" in text


@pytest.mark.parametrize(
    "name, kind",
    [
        (NVJET, PRODUCTS),
        (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>",
            PRODUCTS,
        ),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", PRODUCTS),
        (FLASH, ATTENTION),
        ("fmha_cutlassB_bf16_aligned_128x64_k96_sm80", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", ATTENTION),
        (GATHER, COLLECTIVES),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", COLLECTIVES),
        ("triton_per_fused_native_layer_norm_3", NORMS),
        ("triton_poi_fused_add_2", ELEMENTWISE),
        (POINTWISE, ELEMENTWISE),
        (COPY, COPIES),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<4u>", COPIES),
        ("Memset (Device)", COPIES),
        ("void at::native::(anonymous namespace)::indexFuncLargeIndex<float>", OTHER),
    ],
)
def test_a_kernel_of_unknown_launch_is_known_by_its_name(name, kind):
    """As of a CUDA graph, or where the profiler has lost the launch."""
    events = [mark("dolmen: step", 0, 100), kernel(name, 10, 60)]
    assert [row.kind for row in table(events).rows] == [kind, IDLE]


def test_two_kernels_at_once_share_the_time():
    events = [mark("dolmen: step", 0, 100)]
    for name in (NVJET, COPY):
        events.append(kernel(name, 10, 50))
    got = {row.kind: round(1e6 * row.seconds) for row in table(events).rows}
    assert got == {PRODUCTS: 25, COPIES: 25, IDLE: 50}


def test_on_a_cpu_it_is_the_time_of_operators_without_those_they_call():
    gloo = mark("gloo:all_reduce", 405, 300)  # on gloo's own thread: it overlaps what follows
    gloo.is_async = True
    events = [
        mark("dolmen: step", 0, 1000),
        op("aten::linear", 10, 200),
        op("aten::mm", 20, 150),
        op("aten::copy_", 30, 40),
        op("aten::sort", 300, 50),
        mark("dolmen: tp all-reduce", 400, 20),
        gloo,
        op("aten::mul", 430, 100),
        mark("dolmen: tp wait", 600, 110),
        op("_c10d_functional::wait_tensor", 610, 90),
        op("aten::mul", 100, 500, tid=99),  # another thread's
    ]
    found = table(events)
    got = {row.kind: round(1e6 * row.seconds) for row in found.rows}
    assert got == {
        PRODUCTS: 160,
        COPIES: 40,
        OTHER: 50,
        "collectives tp": 130,
        ELEMENTWISE: 100,
        IDLE: 520,
    }
    calls = {row.kind: row.calls for row in found.rows}
    assert calls["collectives tp"] == 1 and calls[PRODUCTS] == 1 and not found.gpu


def test_waiting_for_others_is_what_a_collective_took_beyond_the_least():
    """Of 100 us with 40 exposed, 75 were spent waiting for the last rank to come: so were 30 of the
    40.
    """
    found, durations = tabulate(recorded(gpu()))
    measured = {kind: 1e6 * sum(seconds) for kind, seconds in durations.items()}
    assert measured == pytest.approx(
        {"collectives tp": 100, "collectives fsdp": 20, "collectives edp": 10}
    )
    found = found.split_waiting(measured, {"collectives tp": 25.0})
    got = {row.kind: (1e6 * row.seconds, 1e6 * row.busy) for row in found.rows}
    assert got["collectives tp"] == pytest.approx((10, 25))
    assert got[WAITING] == pytest.approx((30, 30))
    assert got["collectives fsdp"] == pytest.approx((20, 20))  # of which nothing is known
    assert sum(row.seconds for row in found.rows) == pytest.approx(found.seconds, rel=1e-12)


def test_a_trace_of_something_else_is_refused():
    with pytest.raises(ValueError, match="has no range 'dolmen: step'"):
        tabulate(recorded([op("aten::mm", 0, 1)]))


def test_lines_have_shares_milliseconds_and_calls():
    """Work that overlaps is told from over a tenth of a millisecond on."""
    rows = (
        KindRow(PRODUCTS, 0.6, 1412, 0.7),
        KindRow(ATTENTION, 0.3, 1, 0.3001),
        KindRow(IDLE, 0.0, 0, 1e-4),
        KindRow(NORMS, 0.0, 2, 1.1e-4),
    )
    overlapped = "overlapped with other work"
    lines = ProfileTable(1.2, False, rows, 0.25).lines()
    assert lines == [
        f"{PRODUCTS:27} 50.0 %      600.0 ms   1,412 calls; 100.0 ms more {overlapped}",
        f"{ATTENTION:27} 25.0 %      300.0 ms       1 calls",
        f"{IDLE:27}  0.0 %        0.0 ms ",
        f"{NORMS:27}  0.0 %        0.0 ms       2 calls; 0.1 ms more {overlapped}",
        "of these 250.0 ms were recomputation of forward",
    ]
    assert len(ProfileTable(1.2, False, rows, 0.0).lines()) == 4
