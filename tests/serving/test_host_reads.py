"""Nothing of a step is read back to the host until its tokens are sampled, so that the host queues
the whole step ahead of a GPU, and CUDA graphs can record it. Tensors on the meta device have no
values: what is read of them raises an error.
"""

from dataclasses import replace

import pytest
import torch
from decoders import DECODERS, SIZES, VOCABULARY
from tiny_models import Flat

from dolmen.core.device import replace_read_back
from dolmen.core.mesh import SINGLE
from dolmen.model import build
from dolmen.ops.kernels import H100
from dolmen.serving.engine import Engine
from dolmen.serving.request import Request, SamplingParams

EXPERTS: dict = SIZES | dict(num_key_value_heads=2, num_experts=4, moe_intermediate_size=16)
MODELS = DECODERS | {"experts": Flat(**EXPERTS)}
PARAMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(0.7),
    "top-k": SamplingParams(0.7, top_k=5),
    "top-p": SamplingParams(0.7, top_p=0.9),
    "min-p": SamplingParams(0.7, min_p=0.1),
    "penalties": SamplingParams(
        0.7, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={3: 1.0}, min_new_tokens=2
    ),
}


def reads(name: str, params: SamplingParams, sequences: int = 3) -> list[int]:
    """Run prompts and decode steps of a model on meta with a GPU's kernels. Returns how many
    numbers each step reads back.
    """
    model = build.place(MODELS[name].spec, SINGLE, dtype=torch.bfloat16, hardware=H100).eval()
    sizes: list[int] = []

    def answer(x, rows):
        sizes.append(x.numel())
        return [1.0] * x.numel()  # token 1, a near tie, finite

    with Engine(model, known=range(VOCABULARY - 1)) as engine, replace_read_back(answer):
        for i in range(sequences):
            engine.add(
                Request([5, 6, 7][: i + 1], replace(params, max_new_tokens=4), i, logprobs="raw")
            )
        while engine.busy:
            engine.step()
    return sizes


def test_a_step_reads_its_sampled_tokens_alone():
    """Of each way that keys and positions reach attention, and of experts, whose rows a GPU's
    kernels do not count on the host: one sequence, and several.
    """
    # token, near tie, finite, log-probability
    expected = {count: [4 * count] * 4 for count in (1, 3)}
    failed = {}
    for name in MODELS:
        for count in expected:
            try:
                found: object = reads(name, PARAMS["greedy"], count)
            except Exception as error:
                found = error
            if found != expected[count]:
                failed[name, count] = found
    assert not failed


@pytest.mark.parametrize("name", PARAMS)
def test_no_way_of_sampling_reads(name):
    assert reads("grouped", PARAMS[name]) == [12] * 4


def test_a_read_raises(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", True)
    with pytest.raises(RuntimeError, match="meta"):
        reads("grouped", PARAMS["top-p"])
