"""Every family against Megatron's ranks: written and proved to the bit, or refused in a line that
says what Megatron does not compute.
"""

import pytest
import torch
from family_cases import CASES, config_of

from dolmen.conversion import hf_export
from dolmen.conversion.config import ConvertConfig
from dolmen.conversion.convert import convert
from dolmen.families import ModelConfig

WRITTEN = {
    "llama",
    "llama-linear",
    "mistral",
    "mistral-window",
    "mixtral",
    "mixtral-window",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "gpt2",
    "gpt2-untied",
    "gpt-bigcode",
    "gpt-bigcode-heads",
    "falcon-classic",
    "falcon-one-after-the-other",
    "internlm2",
    "phi3",
    "baichuan-7b",
    "chatglm2",
    "chatglm2-32k",
    "glm",
    "starcoder2",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_family_is_written_the_same_or_refused(case, tmp_path):
    model = ModelConfig(config_of(case))
    random = {name: torch.randn(shape) for name, shape in model.spec.shapes.items()}
    hf_export.save(tmp_path / "hf", model, random.__getitem__)
    config = ConvertConfig(str(tmp_path / "hf"), str(tmp_path / "out"), "megatron-core")
    if case in WRITTEN:
        assert convert(config).endswith("equal bit for bit; logits equal")
        return
    with pytest.raises(ValueError) as refused:
        convert(config)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()
