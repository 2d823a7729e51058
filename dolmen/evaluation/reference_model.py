"""The reference model: transformers' own implementation, loaded without any code of the folder, and
its tensors under our names.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from dolmen.conversion.weights import assemble
from dolmen.data.batch import FOLLOWS, Batch
from dolmen.evaluation.validate import has_next_sentence_head
from dolmen.families import ModelConfig, weight_map


def random_tokens(
    vocabulary: int, shape: tuple[int, int], padding: int | None, seed: int
) -> Int64[Tensor, "sequences window"]:
    """Return random token ids below `vocabulary`, of this shape, by `seed`, without the id
    `padding` (None: with all): transformers gives that embedding row no gradient (padding_idx),
    while dolmen treats it as any token, so it would show as a difference of 1e-2.
    """
    generator = torch.Generator().manual_seed(seed)
    if padding is None or vocabulary == 1:  # of one token, nothing else can be sampled
        return torch.randint(vocabulary, shape, generator=generator)
    windows = torch.randint(vocabulary - 1, shape, generator=generator)
    return windows + (windows >= padding % vocabulary)  # torch counts a negative one from the end


def load_reference(
    folder: Path, stated: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Any:
    """Load transformers' model from a folder, for evaluation: AutoModelForCausalLM, or for
    bidirectional models ForMaskedLM (ForPreTraining with a next-sentence head). Never runs code of
    the folder. `stated`: its model as dolmen reads it. Attention is "eager", nearest to the papers,
    except for Falcon, whose eager attention adds ALiBi twice.
    """
    # 2.4 s to import: not owed by `--help`
    from transformers.models.auto.modeling_auto import (
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForPreTraining,
    )

    # its annotations allow neither .to(device) nor .generate
    kind: Any = AutoModelForMaskedLM if stated.spec.both_ways else AutoModelForCausalLM
    if has_next_sentence_head(stated.spec):
        kind = AutoModelForPreTraining
    falcon = stated.model_type == "falcon"
    model = kind.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="sdpa" if falcon else "eager",
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
    )
    model.config.output_router_logits = False  # or the loss would hold the auxiliary one
    return model.to(device).eval()


def logits_and_loss(
    network: Any, stated: ModelConfig, batch: Batch
) -> tuple[Float[Tensor, "sequences length vocabulary"], Float[Tensor, ""]]:
    """Run transformers' `network` on a batch; return its logits, and the mean cross-entropy over
    labels, plus that of the next-sentence head if the model `stated` has one. The loss is in fp32
    or wider.
    """
    tokens = batch.tokens.to(network.device)
    out = network(tokens, **({} if stated.spec.both_ways else {"use_cache": False}))
    pairs = has_next_sentence_head(stated.spec)
    logits = out.prediction_logits if pairs else out.logits
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss = F.cross_entropy(logits.flatten(0, 1).to(wide), batch.labels.to(tokens).flatten())
    if pairs:  # label 1: the second is of elsewhere
        elsewhere = (batch.numbers[FOLLOWS][:, 0] < 0).to(tokens)
        loss = loss + F.cross_entropy(out.seq_relationship_logits.to(wide), elsewhere)
    return logits, loss


@contextmanager
def fp32_products() -> Iterator[None]:
    """Context manager in which fp32 matrix products run in full fp32, not in TF32, which keeps 10
    bits.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Context manager in which transformers prints errors only, no progress bars or advice."""
    from transformers import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def tensors_by_our_names(model: ModelConfig, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return dolmen's parameter name -> tensor, for tensors of transformers' parameters (`stored`:
    its name -> weight or gradient): fused ones are split by the import rules.
    """
    weights = weight_map(model)
    named = {weights.canonical(name): tensor for name, tensor in stored.items()}
    return dict(assemble([weights.entries[name] for name in named], named.__getitem__))
