"""How many programs a compiled model is: as many as there are blocks that really differ, not one
per layer, whose number is data, and the final norm. Counted by a backend that compiles nothing.
"""

from dataclasses import dataclass, replace

import pytest
import tiny_models
import torch
from tiny_models import Flat, Tiny
from torch import nn

from dolmen.core import mesh as meshes
from dolmen.core.mesh import SINGLE
from dolmen.data.batch import Batch
from dolmen.evaluation.validate import mean_loss
from dolmen.model.head import cross_entropy_function
from dolmen.model.layout import Layout
from dolmen.model.spec import LoraSpec
from dolmen.model.training import Training
from dolmen.ops.attention import Documents
from dolmen.ops.kernels import Kernels
from dolmen.ops.numerics import Fp8
from dolmen.optim.optimizer import OptimizerConfig, adamw
from dolmen.parallel import vocabulary
from dolmen.parallel.simulation import make_schedule
from dolmen.training.loop import report_recompile_limit
from dolmen.training.state import TrainState
from dolmen.training.step import optimizer_step

CONFIG = Flat(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=12,  # more than torch.compile makes programs of one function
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    initializer_range=0.3,
    dropout=0.1,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
KERNEL = Kernels(grouped="grouped_mm")  # of bf16
OPTIMIZER = OptimizerConfig()


def rounded(config: Flat) -> Tiny:
    """Its products in eight bits, by scales of the steps before."""
    return Tiny(config.spec, Training(0.1, fp8=Fp8("fp8-delayed")))


def adapted(config: Flat) -> Tiny:
    """Frozen, with adapters on every matrix."""
    matrices = (n for n, param in config.spec.params.items() if param.role == "matrix")
    return Tiny(config.spec, Training(0.1, adapter=LoraSpec(2, 8.0, frozenset(matrices))))


@dataclass(frozen=True)
class Case:
    """A run of two steps, then validation on batches of `validated` sequences."""

    programs: int
    config: Flat | Tiny = CONFIG
    layout: Layout = Layout()
    documents: bool = False
    validated: tuple[int, ...] = ()
    schedule: tuple = ("1f1b", 1, 2)
    kernels: Kernels = Kernels()
    sharded: bool = True
    """By ZeRO, whose hooks are no part of a program."""


CASES = {
    "one block": Case(2),
    # with gradients; without; without, of any number of sequences
    "a smaller last batch of validation": Case(5, validated=(4, 4, 1)),
    "a smaller last batch, documents": Case(5, validated=(4, 4, 1), documents=True),
    "windows in some layers": Case(
        3, replace(CONFIG, sliding_window=8, sliding_layers=(1, 3, 5, 7))
    ),
    "a window in every layer": Case(2, replace(CONFIG, sliding_window=8)),
    "documents": Case(2, documents=True),
    "some layers recompute attention": Case(
        3, layout=Layout(recompute="selective", recompute_layers=5)
    ),
    "some layers recompute all": Case(3, layout=Layout(recompute="full", recompute_layers=5)),
    "sparse layers": Case(2, replace(CONFIG, **EXPERTS)),
    "sparse and dense layers": Case(3, replace(CONFIG, **EXPERTS, dense_layers=(0, 1, 5))),
    "sparse layers, one kernel": Case(2, replace(CONFIG, **EXPERTS), kernels=KERNEL, sharded=False),
    "sparse layers, one kernel, recomputed": Case(
        2, replace(CONFIG, **EXPERTS), Layout(recompute="full"), kernels=KERNEL, sharded=False
    ),
    # router and experts are units of their own: up to each, within each, and after, where the rest
    # of each function that calls them is a program
    "sparse layers, one kernel, zero 3": Case(
        9, replace(CONFIG, **EXPERTS), Layout(zero=3), kernels=KERNEL
    ),
    # what enters the first layer is frozen
    "adapters": Case(3, adapted(CONFIG)),
    # what lies between products; the products are no part of a program
    "products in eight bits": Case(5, rounded(CONFIG)),
    "two stages": Case(2, layout=Layout(virtual_stages=2), schedule=("interleaved", 1, 2, 2)),
    "zero 0": Case(2, layout=Layout(zero=0)),
    "zero 1": Case(2, layout=Layout(zero=1)),
    "zero 3, validated": Case(5, layout=Layout(zero=3), validated=(4, 1)),
}
SHORT = ("one block",)  # the first in a process imports the compiler: 3 s


def programs(case: Case, monkeypatch) -> int:
    """How many graphs the compiler was given."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile(self, backend=backend))
    monkeypatch.setattr(vocabulary, "_compiled_chunk", lambda: vocabulary._chunk)
    monkeypatch.setattr(vocabulary, "compile_accumulate", lambda: vocabulary.accumulate)
    torch.compiler.reset()
    monkeypatch.setattr(tiny_models.building, "choose_kernels", lambda *_: case.kernels)
    with meshes.process_group_context(None, torch.device("cpu")):
        run(case, meshes.build_mesh(1, 1, torch.device("cpu")) if case.sharded else SINGLE)
    return len(made)


def run(case: Case, mesh) -> None:
    schedule = make_schedule(*case.schedule)
    half = torch.bfloat16 if case.kernels == KERNEL else torch.float32
    model = tiny_models.build(
        case.config,
        mesh,
        case.layout,
        schedule,
        dtype=torch.float32 if case.sharded else half,
        compute=half,
        compile=True,
    )
    tiny_models.initialize(model, 0)
    state = TrainState(
        model.train(), adamw(model, OPTIMIZER), OPTIMIZER, 2, case.layout.zero, schedule
    )
    for _ in range(2):
        optimizer_step(state, batch(4, case.documents), mesh)
    for sequences in case.validated:
        mean_loss(model, [batch(sequences, case.documents)], mesh)


def batch(sequences: int, documents: bool) -> Batch:
    tokens = torch.arange(sequences * 16).view(-1, 16) % 32
    return Batch(
        tokens,
        tokens.roll(-1, 1),
        Documents.from_starts(torch.zeros_like(tokens)) if documents else None,
    )


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Without dropout, as in validation, attention has passes that a C++ compiler makes, and so it
    has outside a program.
    """
    tier = [] if name in SHORT else [pytest.mark.full]
    spawns = CASES[name].validated or CASES[name].kernels == KERNEL
    return tier + ([pytest.mark.spawn] if spawns else [])


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CASES])
def test_programs(name, monkeypatch):
    messages = []
    with report_recompile_limit(messages.append):
        assert programs(CASES[name], monkeypatch) == CASES[name].programs
    # where a program ends inside a function, what compares its shapes is compiled too, of all
    # functions as one
    assert [line for line in messages if "tests/shapes.py" not in line] == []


@pytest.mark.full  # of a C++ compiler
@pytest.mark.spawn
@pytest.mark.parametrize("changed", (adapted, rounded))
def test_what_is_compiled_computes_the_same(changed):
    """Of adapters the compiler joins a product and the sum it is added to, and torch 2.13 forgets a
    factor.
    """
    tokens, found = torch.arange(16).view(1, -1), []
    for compiled in (False, True):
        torch.compiler.reset()
        small = changed(replace(CONFIG, num_hidden_layers=2))
        model = tiny_models.build(small, SINGLE, compile=compiled).eval()
        tiny_models.initialize(model, 0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("lora_B"):
                    p.fill_(0.1)
        total = model(tokens, cross_entropy_function(tokens))
        total.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((total.item(), gradients))
    (want, true), (got, gradients) = found
    assert got == pytest.approx(want, rel=1e-6)  # of fp32
    assert gradients.keys() == true.keys()
    for name, g in gradients.items():
        assert (g - true[name]).abs().max() <= 1e-4 * true[name].abs().max(), name


def test_a_run_says_that_the_compiler_has_given_up():
    messages = []
    # not monkeypatch, which deletes it afterwards, and with it the limit of all later tests
    with report_recompile_limit(messages.append), torch._dynamo.config.patch(recompile_limit=2):
        times = torch.compile(lambda x, n: x * n, backend="eager", dynamic=False)
        for number in range(5):
            assert float(times(torch.ones(()), number)) == number
    assert len(messages) == 1 and "after 2 programs" in messages[0] and "\n" not in messages[0]
