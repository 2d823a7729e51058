"""What a model answers to beginnings of stories that were held out: drawn and scored by
`transformers`, on what each run has exported, so nothing that has trained it is asked.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.rlhf import task

SAMPLES, LONGEST = 8, 40


@dataclass(frozen=True)
class Measured:
    """Means over stories to held-out questions."""

    reward: float
    error: float
    """Standard error of `reward`."""
    kl: float
    """Nats per story from the start: the mean of log p - log q of what p has drawn."""
    kl_error: float
    fits: float
    """Share that have the form of what was asked for, and end."""
    answers: int
    story: str
    """The first."""


def measure(folder: Path, start: Path, subjects: Sequence[tuple[str, str]]) -> Measured:
    """A model that transformers opens, against one of the same tokenizer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(start)
    model, reference = (
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32).eval()
        for one in (folder, start)
    )
    begun = [task.beginning(*one) for one in subjects for _ in range(SAMPLES)]
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    asked = tokenizer([one + "\n" for one in begun], padding=True, return_tensors="pt")
    torch.manual_seed(0)
    with torch.no_grad():
        drawn = model.generate(
            input_ids=asked["input_ids"],
            attention_mask=asked["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=LONGEST,
            pad_token_id=tokenizer.pad_token_id,
        )
        answers = drawn[:, asked["input_ids"].shape[1] :]
        off = [_log_probability(one, asked, answers) for one in (model, reference)]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    rewards = torch.tensor([task.reward("", text, {}) for text in texts])
    ended = (answers == tokenizer.eos_token_id).any(1).tolist()
    fits = [end and task.fits(text) for text, end in zip(texts, ended, strict=True)]
    kl, root = off[0] - off[1], math.sqrt(len(texts))
    return Measured(
        float(rewards.mean()),
        float(rewards.std() / root),
        float(kl.mean()),
        float(kl.std() / root),
        sum(fits) / len(fits),
        len(texts),
        texts[0],
    )


def _log_probability(model: Any, asked: Any, answers: Tensor) -> Tensor:
    """[answers]: of each whole answer, its end included and nothing behind it."""
    end = model.config.eos_token_id
    ended = (answers == end).cumsum(1)
    counts = (ended == 0) | ((ended == 1) & (answers == end))
    ids = torch.cat([asked["input_ids"], answers], 1)
    mask = torch.cat([asked["attention_mask"], counts.long()], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    here = logits[:, asked["input_ids"].shape[1] - 1 : -1]
    found = -F.cross_entropy(here.transpose(1, 2), answers, reduction="none")
    return (found * counts).sum(1)


def keep(found: dict[str, Measured], file: Path) -> None:
    file.write_text(json.dumps({name: asdict(one) for name, one in found.items()}, indent=1))


def kept(file: Path) -> dict[str, Measured]:
    if not file.exists():
        return {}
    return {name: Measured(**one) for name, one in json.loads(file.read_text()).items()}
