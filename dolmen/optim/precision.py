"""Arithmetic of a step: masters of fp32 or wider; fp16 needs its loss scaled so that small
gradients do not vanish (1710.03740).
"""

from dataclasses import dataclass

import torch

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def at_rest(dtype: str) -> torch.dtype:
    """What weights and optimizer state rest in, of a run that computes in `dtype`."""
    return torch.promote_types(DTYPES[dtype], torch.float32)


@dataclass
class LossScale:
    """A dynamic scale: halved when a gradient overflows, doubled after `patience` steps without.
    Constant 1 unless dynamic.
    """

    dynamic: bool
    value: float = 1.0
    good_steps: int = 0
    patience: int = 2000

    @staticmethod
    def of(dtype: str) -> "LossScale":
        return LossScale(True, 2.0**16) if dtype == "float16" else LossScale(False)

    def update(self, finite: bool) -> None:
        if not self.dynamic:
            return
        if not finite:
            self.value, self.good_steps = max(1.0, self.value / 2), 0
        elif self.good_steps + 1 == self.patience:
            self.value, self.good_steps = self.value * 2, 0
        else:
            self.good_steps += 1
