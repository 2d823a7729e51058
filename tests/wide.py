"""Models of `transformers` in float64 throughout: of the oracle (tests/oracle) and of the families'
tests. As trainer.py of the oracle it shares nothing with the house.
"""

from functools import partial

import torch
import torch.nn.functional as F
import transformers
from torch.overrides import TorchFunctionMode
from transformers.models.bloom.modeling_bloom import BloomGelu


class Wide(TorchFunctionMode):
    """Whatever asks for fp32 is given fp64: the modules of `transformers` compute norms, rope,
    softmax and routing in fp32 whatever the model is.
    """

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        def wide(x: object) -> object:
            return torch.float64 if x is torch.float32 else x

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        kwargs = {name: wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(wide, args), **kwargs)


def double(
    config: transformers.PreTrainedConfig, made: str = "AutoModelForCausalLM"
) -> torch.nn.Module:
    """The model of a config.json, by the class `made` of transformers, for evaluation, its values
    not yet set. To be called in `Wide`.

    Numbers that it makes as it is built (frequencies of rope, the scale of Gemma's embedding) are
    fp64 too, and BLOOM's gelu has the root of 2 / pi and not the eight digits that are written
    there. Attention and experts by their definitions, as other implementations of experts take no
    fp64; but for Falcon, whose eager attention adds ALiBi twice, to scores and in the mask.
    """
    config._experts_implementation = "eager"
    attention = "sdpa" if config.model_type == "falcon" else "eager"
    with Wide():
        model = getattr(transformers, made).from_config(
            config, dtype=torch.float64, attn_implementation=attention
        )
    for module in model.modules():
        if isinstance(module, BloomGelu):
            module.forward = partial(F.gelu, approximate="tanh")
    return model.double().eval()
