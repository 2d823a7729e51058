"""--train.deterministic: which operators of a step have no fixed order of additions on a GPU, by
torch's own list, and what becomes of the flag.
"""

import os
import re
from types import SimpleNamespace

import flash_kernel
import pytest
import tinyrun
import torch
from tiny_models import Flat, build, initialize
from tinyrun import dolmen, losses, same, tensors
from torch.utils._python_dispatch import TorchDispatchMode

from dolmen.cli import command
from dolmen.core import determinism
from dolmen.core.mesh import SINGLE
from dolmen.core.messages import Failed
from dolmen.data.batch import Batch
from dolmen.launch import process
from dolmen.model.layout import Layout
from dolmen.ops.attention import Documents
from dolmen.ops.kernels import CPU, H100
from dolmen.optim import optimizer as optim
from dolmen.optim.config import OptimizerConfig
from dolmen.training import report, worker
from dolmen.training import run as train_run
from dolmen.training.config import RunConfig, TrainConfig
from dolmen.training.state import TrainState
from dolmen.training.step import optimizer_step

material, one_thread = tinyrun.material, tinyrun.one_thread

# What torch's documentation says of an operator on a GPU, by its name there, and its name in aten.
ATEN = {
    "__getitem__": "index_backward",
    "NLLLoss": "nll_loss",
    "EmbeddingBag": "_embedding_bag",
    "interpolate": "upsample",
    "grid_sample": "grid_sampler",
}


def listed(sentence: str) -> set[str]:
    """aten's names of the operators in the list of torch's documentation that begins with this."""
    text = torch.use_deterministic_algorithms.__doc__
    part = text[text.index(sentence) + len(sentence) :]
    part = re.split("The following normally|In addition, several", part)[0]
    found = re.findall(r"\* :(?:class|func|meth):`([\w.]+)`([^*]*)", part)
    return {aten(name.split(".")[-1]) for name, when in found if "MPS" not in when}


def aten(name: str) -> str:
    name = ATEN.get(name, name)
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()  # AvgPool3d: avg_pool3d
    return snake.strip("_") if name.endswith("_") else snake


REFUSED = listed("normally-nondeterministic operations will throw a\n    :class:`RuntimeError`")
COVERED = listed("normally-nondeterministic operations will act\n    deterministically")
# of the refused, what is asked for in a way that is not: see `Seen`
HARMLESS = {"cumsum", "bincount"}


def test_the_lists_are_read():
    assert {"bincount", "put", "nll_loss", "histc", "avg_pool3d"} <= REFUSED
    assert {"scatter_add", "index_add", "gather", "index_copy"} <= COVERED
    assert "cumsum" in REFUSED ^ COVERED  # refused until 2.13, covered in 2.15
    assert not REFUSED & COVERED - {"put", "scatter_reduce"}  # it depends on how they are asked


class Seen(TorchDispatchMode):
    """Names of the aten operators that run; those of HARMLESS only where they are refused: a sum of
    numbers that are not integers, a count with weights.
    """

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        name = op.name().split("::")[1].split(".")[0].strip("_")
        refused = {
            "cumsum": lambda: out.is_floating_point(),
            "bincount": lambda: len(args) > 1 and args[1] is not None,
        }
        if name not in refused or refused[name]():
            self.names.add(name)
        return out


EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
GPT2 = dict(
    position="learned",
    norm="layernorm",
    mlp="plain",
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
    num_key_value_heads=4,
)
FAMILIES = {
    "llama": {},
    "mistral": dict(sliding_window=5),
    "qwen3": dict(qk_norm=True, tie_word_embeddings=True),
    "gpt2": GPT2,
    "gpt2 dropout": GPT2 | dict(dropout=0.1),
    "mixtral": EXPERTS,
    "qwen3-moe": EXPERTS | dict(qk_norm=True, router_z_loss_coef=1e-3),
    "bias": EXPERTS | dict(router_balance="bias", router_bias_rate=1e-3),
}


def step_of(changes: dict, hardware, dtype: torch.dtype) -> set[str]:
    """The operators of a step, with documents and recomputation."""
    layout = Layout(recompute="full").resolve(1)
    config = Flat(**{**tinyrun.MODEL, **changes})
    schedule = layout.make_schedule(2, 1)
    model = build(config, SINGLE, layout, schedule, dtype=dtype, hardware=hardware)
    initialize(model, 0)
    optimizer = optim.adamw(model, OptimizerConfig())
    optim.prime(optimizer)
    state = TrainState(model, optimizer, OptimizerConfig(), 10, 1, schedule)
    tokens = torch.arange(34).view(2, 17)
    starts = torch.tensor([0] * 7 + [7] * 9).repeat(2, 1)
    batch = Batch(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), Documents.from_starts(starts)
    )
    seen = Seen()
    with seen:
        optimizer_step(state, batch, SINGLE)
    return seen.names


# `scatter` and `scatter_add` write each place once, which torch cannot know; `bmm` is meant of
# sparse matrices, and `gather` and `embedding` (2.15) of their gradients, a `scatter_add` and what
# is held below.
KNOWN = {"scatter_add", "scatter", "gather", "bmm", "embedding"}
DENSE = [name for name, changes in FAMILIES.items() if "num_experts" not in changes]


def held(names: set[str]) -> None:
    assert not names & REFUSED
    assert names & COVERED <= KNOWN, names & COVERED - KNOWN
    # on neither list: it adds in the order of a stable sort
    assert "embedding_dense_backward" in names


@pytest.mark.parametrize("family", FAMILIES)
def test_no_operator_of_a_step_is_refused_and_the_covered_are_known(family):
    held(step_of(FAMILIES[family], CPU, torch.float32))


@pytest.mark.parametrize("family", DENSE)
def test_nor_of_an_h100s_road(family):
    """With a stand-in for its flash kernels, whose own backward follows torch's flag."""
    with flash_kernel.on_cpu():
        names = step_of(FAMILIES[family], H100, torch.bfloat16)
    held(names)
    assert "dropout" in family or "flash_attention_backward" in names


def test_a_refused_operator_would_be_seen():
    with Seen() as seen:
        torch.ones(3).cumsum(0)
        torch.ones(3).put_(torch.tensor([0]), torch.ones(1))
    assert "put" in seen.names & REFUSED and "cumsum" in seen.names & (REFUSED | COVERED)
    with Seen() as seen:
        torch.arange(3).cumsum(0)
        torch.arange(3).bincount()
    assert not seen.names & REFUSED


def flags() -> tuple:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch._inductor.config.deterministic,
    )


def test_the_flag_is_set_within_and_as_before_afterwards():
    before = flags()
    with pytest.raises(KeyError), determinism.deterministic_mode(True):
        assert flags() == (True, False, True, False, True)
        raise KeyError
    assert flags() == before
    with determinism.deterministic_mode(False):
        assert flags() == before
    with determinism.deterministic_mode(True), determinism.deterministic_mode(True):
        pass
    assert flags() == before


@pytest.mark.parametrize(
    "holder, name",
    (
        (torch.utils.deterministic, "fill_uninitialized_memory"),
        (torch.backends.cudnn, "deterministic"),
        (torch.backends.cudnn, "benchmark"),
    ),
)
@pytest.mark.parametrize("value", (True, False))
def test_each_flag_is_restored_whatever_it_was(monkeypatch, holder, name, value):
    monkeypatch.setattr(holder, name, value)
    before = flags()
    with determinism.deterministic_mode(True):
        assert flags() == (True, False, True, False, True)
    assert flags() == before and getattr(holder, name) is value


def test_what_has_no_other_way_is_named_with_the_knob():
    """`put_` has none on a CPU either."""
    with (
        pytest.raises(
            determinism.NotDeterministic,
            match=r"^train.deterministic: put_ has no deterministic implementation on this device: "
            "use --train.no-deterministic$",
        ),
        determinism.deterministic_mode(True),
    ):
        torch.ones(3).put_(torch.tensor([0]), torch.ones(1))
    said = "...you must set an environment variable ... CUBLAS_WORKSPACE_CONFIG=:4096:8 or"
    with pytest.raises(
        determinism.NotDeterministic, match="must be :4096:8 or :16:8: unset it, or"
    ):
        with determinism.deterministic_mode(True):
            raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="^another$"), determinism.deterministic_mode(True):
        raise RuntimeError("another")


def test_a_run_gives_the_same_bits_with_it_on_a_cpu(material, tmp_path, monkeypatch):
    """And torch's flag is on before the group is made, and in each step."""
    seen = []
    joined, stepped = worker.meshes.process_group_context, train_run.train_steps

    def join(*given):
        seen.append(
            (torch.are_deterministic_algorithms_enabled(), "CUBLAS_WORKSPACE_CONFIG" in env)
        )
        return joined(*given)

    def train(*given, **named):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return stepped(*given, **named)

    env = os.environ
    monkeypatch.setattr(worker.meshes, "process_group_context", join)
    monkeypatch.setattr(train_run, "train_steps", train)
    for name, words in (("with", ["--train.deterministic"]), ("without", [])):
        result = dolmen(
            "train", material.file, "--train.steps", 3, "--out", tmp_path / name, *words
        )
        assert result.code == 0, result.err
    assert seen == [(True, True), True, (False, False), False]
    assert "CUBLAS_WORKSPACE_CONFIG" not in env and not torch.are_deterministic_algorithms_enabled()
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert same(tensors(tmp_path / "with", 3), tensors(tmp_path / "without", 3))


def test_a_run_that_cannot_says_so_in_a_line(material, tmp_path, monkeypatch):
    def step(*_, **__):
        torch.ones(3).put_(torch.tensor([0]), torch.ones(1))

    monkeypatch.setattr(train_run, "train_steps", step)
    words = ("train", material.file, "--train.deterministic", "--out", tmp_path / "run")
    with pytest.raises(Failed, match="^train.deterministic: put_ has no determ") as raised:
        worker.run(command.read("train", list(map(str, words[1:]))))
    assert raised.value.final


def test_the_environment_is_given_back_and_the_users_stays(monkeypatch):
    monkeypatch.setenv("OURS_IS_SET", "user")
    with process.environment({"OURS_IS_SET": "1", "OURS_IS_NOT": "2"}):
        assert (os.environ["OURS_IS_SET"], os.environ["OURS_IS_NOT"]) == ("user", "2")
    assert os.environ["OURS_IS_SET"] == "user" and "OURS_IS_NOT" not in os.environ


def test_the_header_says_whether_bits_are_the_same():
    gpu, plain = SimpleNamespace(device=torch.device("cuda", 0)), RunConfig()
    config = RunConfig(train=TrainConfig(deterministic=True))
    assert (
        report.describe_reproducibility(plain, SINGLE) is None
        and report.describe_reproducibility(config, SINGLE) is None
    )
    assert "not reproducible bit for bit; --train.deterministic" in report.describe_reproducibility(
        plain, gpu
    )
    assert report.describe_reproducibility(config, gpu).startswith(
        "bitwise reproducible, also after a resume"
    )
