"""Reward models of transformers."""

import tinyrun
import torch
from transformers.models.llama import LlamaConfig, LlamaForSequenceClassification


def classifier(folder, **changes):
    """A reward model of transformers, in float32."""
    said = {**tinyrun.MODEL, "num_labels": 1, "pad_token_id": 0, "initializer_range": 0.2}
    config = LlamaConfig(**{**said, **changes})
    torch.manual_seed(4)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def theirs(model, texts) -> torch.Tensor:
    """Of each text by itself, so that no padding is looked for."""
    return torch.stack([model(torch.tensor([text])).logits[0, 0] for text in texts])
