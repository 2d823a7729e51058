"""Rules on how a step is computed: layout, schedule, products in eight bits, Muon's arithmetic."""

from dolmen.model.spec import check_rounding, check_tokens
from dolmen.training.config import RunConfig


def check_layout(config: RunConfig) -> None:
    """Raises ValueError for a layout that the model or the batch cannot have."""
    batch, microbatch = config.train.global_batch_size, config.microbatch_size
    config.layout.check(config.tree, config.sequence_length, batch, microbatch)
    if config.layout.make_schedule(batch, microbatch).splits_backward:
        config.refuse_compiled()


def check_precision(config: RunConfig) -> None:
    """Raises ValueError, with the numbers, where the arithmetic cannot be as requested: Muon would
    round float64, no product is left to round, or the layout cuts what shares a scale.
    """
    if config.optimizer.muon.dtype == "bfloat16" and config.train.dtype == "float64":
        raise ValueError(
            "optimizer.muon.dtype bfloat16 keeps 8 bits of the 53 of train.dtype float64: use "
            "--optimizer.muon.dtype float32, which of float64 rounds nothing"
        )
    recipe, layout = config.training.fp8, config.layout
    if recipe is None:
        return
    specs = config.trained.leaves
    if all(spec.fp8 is None for spec in specs.values()):
        fp8 = config.train.fp8
        raise ValueError(
            f"train.fp8.first-layers ({fp8.first_layers}) and train.fp8.last-layers "
            f"({fp8.last_layers}) leave none of the {config.tree.layers} layers: set fewer, "
            "or leave out --train.precision"
        )
    check_rounding(specs, {"tp": layout.tp})
    length = config.sequence_length
    local = config.microbatch_size * length // layout.cp
    tokens = {}
    if layout.cp > 1:
        tokens[f"layout.cp ({layout.cp})"] = length // (2 * layout.cp)
    if (layout.dp or 1) > 1:
        tokens[f"layout.dp ({layout.dp})"] = local
    if layout.sequence_parallel and layout.tp > 1:
        tokens[f"layout.tp ({layout.tp}) with sequence parallelism"] = local // layout.tp
    check_tokens(recipe, tokens)
