"""What a reference of a family without a class in transformers shares with those that have one: it
is called, saved and asked for texts in the same way.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


class Plain(nn.Module):
    """One device, no cache, no kernels: the equations. A subclass has parameters of the names that
    files have, and `logits`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.content = config
        self.generation_config = None

    def logits(self, tokens: Tensor) -> Tensor:
        """[rows, tokens, vocabulary] of [rows, tokens]."""
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits(tokens))

    @torch.no_grad()
    def generate(
        self, prompts: Tensor, max_new_tokens: int | None = None, **options: Any
    ) -> Tensor:
        """The likeliest next token, again and again, as often as is said here or in its
        generation_config; `options` of transformers have no meaning.
        """
        for _ in range(max_new_tokens or self.generation_config.max_new_tokens):
            prompts = torch.cat((prompts, self.logits(prompts)[:, -1:].argmax(-1)), 1)
        return prompts

    def save_pretrained(self, folder: Path, **options: Any) -> None:
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "config.json").write_text(json.dumps(self.content))
        weights = {name: w.clone().contiguous() for name, w in self.state_dict().items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
