"""Training of a module that is not the house's decoder, split by parallel/styles.py: the end of a
step as step.py makes it, with the optimizer that any run has, whose tensors are those of any
checkpoint (optim/optimizer.py: prime, tensors).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dolmen.core.mesh import Mesh
from dolmen.optim.config import OptimizerConfig
from dolmen.optim.optimizer import KINDS, AdamW
from dolmen.parallel import data


def adamw(module: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW of what is trained; matrices decay, and vectors do not."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in trained if (p.ndim > 1) == matrices],
            "weight_decay": config.weight_decay if matrices else 0.0,
            "kinds": KINDS["adamw"],
        }
        for matrices in (True, False)
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Float[Tensor, ""],
    mesh: Mesh,
    clip: float = 1.0,
) -> float:
    """Backward from this rank's share of the loss, which has been divided by the count of the whole
    batch, gradients clipped at `clip` (0: not), update; the norm before. Every rank calls it, and
    the norm is of the world. One that is not finite changes no parameter.
    """
    reduction = data.Reduction(module, 0, False)
    reduction.before_backward([module], True, True)
    loss.backward()
    parameters = [p for p in module.parameters() if p.requires_grad]
    norm = data.gradient_norm(parameters, mesh)
    if clip > 0:
        data.scale_gradients(parameters, (clip / (norm + 1e-6)).clamp(max=1.0))
    if norm.isfinite():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)
