"""What dolmen uses of transformers, for pyright alone: its own `__init__` binds the files of every
model there is, which takes half of pyright's time.
"""

from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.tokenization_utils_tokenizers import (
    PreTrainedTokenizerFast as PreTrainedTokenizerFast,
)
from transformers.utils import logging as logging
