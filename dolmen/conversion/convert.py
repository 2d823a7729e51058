"""Converts any source to a folder of a format that dolmen writes: one tensor in memory per thread.
Nothing stands at the destination until all of it is written and proved.

Proof. The written folder is opened again, from its own files alone, and compared with
the source: every tensor to the bit, then the logits. Both models compute on the same random tokens
in fp32, from the numbers that were written, so all logits are equal to the bit. Where both models
fit into memory they are computed whole, else a layer at a time, with one layer's weights in memory,
comparing the hidden vectors after every layer.
"""

import warnings
from collections.abc import Callable, Collection, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import MofNCompleteColumn
from torch import Tensor

from dolmen.conversion import checkpoint, hf_export, peft, sidecars, writing
from dolmen.conversion.config import ConvertConfig
from dolmen.conversion.hf import stated_dtype
from dolmen.conversion.megatron import dist_export, export, names
from dolmen.conversion.source import ModelSource, cast_source, open_source
from dolmen.conversion.weights import Moments, Scales, Tensors
from dolmen.conversion.writing import Advance, LayerPool, group_by_layer
from dolmen.core.filesystem import is_url
from dolmen.core.log import bar
from dolmen.core.messages import Failed, escape, plural
from dolmen.families import unknown
from dolmen.files import storage
from dolmen.model import head
from dolmen.model.decoder import Decoder
from dolmen.model.split import PipelinePart, single_process
from dolmen.optim.optimizer import DTYPES


class ModelWriter(Protocol):
    """Writes a model in one format. The constructor raises ValueError for a model that the format
    cannot hold, before anything is written.
    """

    @property
    def tensors(self) -> int:
        """Number of tensors that `write` will write, for a progress bar."""
        ...

    @property
    def scales(self) -> Scales:
        """Scales of fp8 delayed scaling that `write` writes, as they will read back, by parameter
        name.
        """
        ...

    def write(self, folder: Path, pool: LayerPool) -> None:
        """Write the weights into an empty folder, with parts of the model in the threads of
        `pool`.
        """
        ...

    def write_sidecars(self, folder: Path) -> None:
        """Write the sidecar files (config.json, tokenizer, tracker) into `folder`, another, empty
        folder: they join the weights once these are verified.
        """
        ...

    def open_written(self, folder: Path, sidecars: Path) -> ModelSource:
        """Open the written weights in `folder` as any reader would, with the sidecar files in the
        folder `sidecars`.
        """
        ...


def export_model(
    source: str | Path,
    to: str | Path,
    dtype: str | None = None,
    adapters: bool = False,
    critic: bool = False,
) -> str:
    """Write a source (any format, folder, URL or hub id) to the new folder `to`, or to a URL, as a
    transformers directory, and return the source's title for a report. `dtype`: default that of the
    source's config.json. `adapters`: write only its LoRA adapters, as PEFT does, in float32 by
    default. `critic`: write the critic of a PPO run in place of its policy. Warns of optimizer
    state and fp8 scales, which are dropped. Raises ValueError, KeyError or OSError.
    """
    # Not compared with the source after writing, as `convert` does.
    opened = open_source(source)
    if critic:
        opened = _open_critic(opened)
    if adapters:
        with storage.output_folder(to) as folder:
            return peft.write(opened, folder, DTYPES[dtype or "float32"])
    unknown.warn(opened.model)
    # as --dtype has it, else as the config.json states
    target = DTYPES[dtype] if dtype else stated_dtype(opened.model)
    _optimizer_state(opened, "hf")
    _check_scales(opened, {}, "hf")
    with storage.output_folder(to) as folder:
        hf_export.write(cast_source(opened, target), folder, target)
    merged = isinstance(opened, checkpoint.RunCheckpoint) and opened.adapter is not None
    return f"{opened.title}, with its adapters merged" if merged else opened.title


def _open_critic(opened: ModelSource) -> ModelSource:
    """Return the critic stored in a PPO run's checkpoint as a source. Raises ValueError for any
    other source, and for a run without a critic.
    """
    if not isinstance(opened, checkpoint.RunCheckpoint):
        raise ValueError(
            f"{opened.where} is not a dolmen run, so it has no critic (dolmen train ppo trains "
            "one): leave out --critic"
        )
    return checkpoint.critic(opened)


def convert(config: ConvertConfig, progress: bool = False) -> str:
    """Write the source in the format `config.to`, compare what was written with the source, and
    return a report in lines. `progress`: progress bars on stderr. Raises ValueError, KeyError or
    OSError, before anything is written, for a model that the format cannot hold, and Unlike where
    the written weights, logits or optimizer state differ from the source; then the destination is
    not created.
    """
    with storage.output_folder(config.destination) as folder:
        return _convert(config, folder, progress)


def _convert(config: ConvertConfig, folder: Path, progress: bool) -> str:
    """Convert the source into a local `folder`, compare the result with it, and return the report,
    which names the destination; see `convert`.
    """
    opened = open_source(config.source, vocab_size=config.vocab_size)
    # All checks come before the first byte is written.
    target = folder.resolve()  # a link cannot be replaced by a folder
    unknown.warn(opened.model)
    if config.dtype is None:
        _check_one_dtype(opened)
    hf_export.check_target(target)
    # a mount point cannot be replaced by a rename
    if target.is_mount():
        raise ValueError(f"{target} is a mount point: give a folder inside it")
    dtype = DTYPES[config.dtype] if config.dtype else stated_dtype(opened.model)
    source, state = cast_source(opened, dtype), _optimizer_state(opened, config.to)
    writer = WRITERS[config.to](source, dtype, state, config)
    # known before writing: they only depend on the source
    scales = writer.scales
    _check_scales(source, scales, config.to)
    specs = source.specs  # checked here, before threads share the source

    with writing.replace_when_complete(target) as (part, sidecar_folder):
        with bar(f"writing {target}", writer.tensors, progress, MofNCompleteColumn()) as show:
            writer.write(part, LayerPool(config.threads, show))
        writer.write_sidecars(sidecar_folder)
        written = writer.open_written(part, sidecar_folder)

        def compare_layer(parameters: list[str], advance: Advance) -> None:
            """Compare the parameters of one layer, advancing the progress bar for each."""
            for _ in compare_weights(source, written, {*parameters}):
                advance(1)

        with bar("reading the result back", len(specs), progress, MofNCompleteColumn()) as show:
            LayerPool(config.threads, show).run(compare_layer, group_by_layer(specs, str))
        logits = compare_logits(source, written)
        report = "" if state is None else compare_state(state, written)
        report += compare_scales(scales, written)
        if config.to != "hf":
            # config.json and tokenizer next to Megatron's files: without them the vocabulary size
            # is lost
            hf_export.write_sidecar_files(source, sidecar_folder, dtype)
    count = plural(len(specs), "parameter")
    destination = escape(config.destination if is_url(config.destination) else target)
    return (
        f"read {escape(source.title)}\nwrote {destination}: {count} read back, equal bit for "
        f"bit; {logits}{report}"
    )


def _optimizer_state(source: ModelSource, to: str) -> Moments | None:
    """Return the optimizer state to write in the format `to`: AdamW's moments, and fp32 masters as
    the kind "param"; None if there is none or the format cannot hold it. Warns, with the reason,
    where the source has such state and it is left behind.
    """
    try:
        state, why = source.moments, f"--to {to} cannot store it"
    # State that cannot be read is no reason to refuse the weights.
    except (ValueError, KeyError) as error:
        state, why = None, str(error.args[0])
    else:
        if state is None:
            return None
        if to == "torch-dist":
            masters = source.precise
            # `precise` of a source without masters is the source itself
            more = {} if masters is source else {"param": masters}
            return Moments(state.step, {**state.kinds, **more})
    warnings.warn(f"the optimizer state is not converted: {why}", stacklevel=3)
    return None


def _check_scales(source: ModelSource, written: Scales, to: str) -> None:
    """Warn where the source has scales of fp8 delayed scaling and none are `written` in the format
    `to`.
    """
    try:
        known, why = len(source.scaling), f"--to {to} cannot store them"
    except ValueError as error:
        known, why = 1, str(error.args[0])
    if known and not written:
        warnings.warn(f"the fp8 scales of delayed scaling are not converted: {why}", stacklevel=3)


def _check_one_dtype(source: ModelSource) -> None:
    """Raise ValueError where trained parameters are stored in several dtypes (a folder merged from
    several sources), as it is then unclear which to write: the user has to give --dtype. Parameters
    that a family always keeps in fp32 are not counted.
    """
    specs, params = source.specs, source.spec.params
    # dtype -> the trained parameters that are stored in it
    kinds: dict[torch.dtype, list[str]] = {}
    for name, spec in specs.items():
        # buffers and router biases have a dtype of their own
        if params[name].trained and not params[name].precise:
            kinds.setdefault(spec.dtype, []).append(name)
    if len(kinds) > 1:
        groups = [
            f"{len(names):,} of {str(kind).removeprefix('torch.')} (e.g. {names[0]})"
            for kind, names in kinds.items()
        ]
        raise ValueError(
            f"{source.where} has parameters of several dtypes: {', '.join(groups)}: choose "
            "one with --dtype"
        )


def _make_hf_writer(
    source: ModelSource, dtype: torch.dtype, state: Moments | None, config: ConvertConfig
) -> ModelWriter:
    """Return the writer of a transformers directory, which has weights alone: `state` and `config`
    are not used. Raises ValueError where config.json cannot express the model.
    """
    hf_export.check_expressible(source.model, source.spec)
    return hf_export.TransformersWriter(source, dtype)


def _make_megatron_writer(
    source: ModelSource, dtype: torch.dtype, state: Moments | None, config: ConvertConfig
) -> ModelWriter:
    """Return the writer of Megatron's rank folders, of its legacy classes or of Megatron-Core, for
    the sizes tp, pp, virtual stages and ep of `config`. Raises ValueError where they do not divide
    the model, or where Megatron or a config.json cannot express it.
    """
    hf_export.check_expressible(source.model, source.spec)
    ranks = export.Ranks(config.tp, config.pp, config.virtual_stages, config.ep)
    # --to megatron: the classes from before Megatron-Core
    dialect = names.LEGACY
    if config.to == "megatron-core":
        dialect = names.LOCAL if config.spec == "local" else names.TE
    scales = source.scaling if dialect is names.TE else {}
    plan = export.ExportPlan(source.spec, ranks, dialect, scales)
    sidecars.express(source.spec)  # or it could not be read back alone
    return export.MegatronWriter(plan, source.read, dtype, source.iteration)


def _make_torch_dist_writer(
    source: ModelSource, dtype: torch.dtype, state: Moments | None, config: ConvertConfig
) -> ModelWriter:
    """Return the writer of a torch_dist checkpoint of Megatron-Core, with the optimizer state if
    any. Raises ValueError where Megatron or a config.json cannot express the model.
    """
    hf_export.check_expressible(source.model, source.spec)
    plan = export.ExportPlan(source.spec, export.Ranks(), names.TE, source.scaling)
    sidecars.express(source.spec)  # or it could not be read back alone
    return dist_export.TorchDistWriter(plan, source.read, dtype, source.iteration, state)


WRITERS: dict[
    str, Callable[[ModelSource, torch.dtype, Moments | None, ConvertConfig], ModelWriter]
] = {
    "hf": _make_hf_writer,
    "megatron": _make_megatron_writer,
    "megatron-core": _make_megatron_writer,
    "torch-dist": _make_torch_dist_writer,
}
"""Constructors of writers by the name of a format."""


TOKENS = 24


ROOM = 2 * 2**30
"""Bytes that both models may take in memory at once."""


class Unlike(Failed):
    """The written model differs from its source."""


def compare_weights(
    source: Tensors, written: Tensors, only: Collection[str] | None = None, of: str = ""
) -> Generator[int, None, None]:
    """Compare parameters bit by bit, `source` cast to the dtype that was written; yield 1 for each
    equal parameter, for a progress bar. `only`: names to compare, default all. Raises Unlike for
    the first parameter that differs (`of` precedes its name, e.g. "exp_avg of "), or where the two
    have different names.
    """
    specs = written.specs
    if source.specs.keys() != specs.keys():
        other = sorted(source.specs.keys() ^ specs.keys())
        raise Unlike(f"the written model has other parameters than {source.where}: {other[:3]}")
    for name, tensor in source.stream(only):
        expected = tensor.to(specs[name].dtype)
        if not _same(expected, written.read(name)):
            raise Unlike(
                f"{of}{name} has changed in {written.where}: written and read values differ"
            )
        # two tensors in memory per thread, also while the next one is read
        del tensor, expected
        yield 1


def compare_state(state: Moments, written: ModelSource) -> str:
    """Compare the written optimizer state with `state`: update count, dtypes and bits; return a
    clause for the report. Raises Unlike where it differs.
    """
    # read back through the same importer that a later resume uses
    moments = written.moments
    if moments is None or moments.step != state.step:
        raise Unlike(f"{written.where} lacks the optimizer state of {state.step} updates")
    kinds = {**moments.kinds, "param": written.precise}
    for kind, tensors in state.kinds.items():
        specs = kinds[kind].specs
        for name in moments.kinds["exp_avg"].specs:
            if specs[name] != tensors.specs[name]:
                raise Unlike(f"{kind} of {name} is {specs[name].dtype} in {written.where}")
        for _ in compare_weights(tensors, kinds[kind], of=f"{kind} of "):
            pass
    # text, for the report
    masters = " and fp32 masters" * ("param" in state.kinds)
    return f"; AdamW moments after {state.step} updates{masters} compared too"


def compare_scales(scales: Scales, written: ModelSource) -> str:
    """Compare the written scales of fp8 delayed scaling with `scales`, bit by bit; return a clause
    for the report, empty without scales. Raises Unlike where they differ.
    """
    written_scales = written.scaling
    if written_scales.keys() != scales.keys():
        raise Unlike(
            f"{written.where} has fp8 scales of {len(written_scales)} weights, expected "
            f"{len(scales)}"
        )
    for name, scaling in scales.items():
        if not all(_same(a, b) for a, b in zip(scaling, written_scales[name], strict=True)):
            raise Unlike(f"fp8 scales of {name} have changed in {written.where}")
    return f"; fp8 scales of {len(scales)} weights compared too" if scales else ""


def compare_logits(source: ModelSource, written: ModelSource, room: int = ROOM) -> str:
    """Compare the fp32 logits of both models on the same random tokens, bit by bit; return a phrase
    that says how. If both models take more than `room` bytes, run one layer at a time and compare
    its hidden vectors. Not compared (the phrase says so) where positions depend on special tokens.
    Raises Unlike naming the first layer that differs.
    """
    model_spec = source.spec
    if model_spec.has_prefix_mask or model_spec.streams > 1:
        return "logits not compared, because positions depend on special tokens"
    # two models in fp32: 2 x 4 bytes per parameter
    need = 8 * sum(param.elements for param in model_spec.params.values())
    # layers that are computed at a time
    step = model_spec.layers if need <= room else 1
    # TOKENS, or fewer where the model has fewer positions
    length = min(TOKENS, model_spec.longest or TOKENS)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(model_spec.vocab_size, (1, length), generator=draw)
    # Both are rounded to the written dtype first: bf16 written from fp32 must give equal logits.
    dtypes = {name: spec.dtype for name, spec in written.specs.items()}
    # hidden vectors that the layer before has returned, on each side
    logits = other = None
    for start in range(0, model_spec.layers, step):
        layers = range(start, min(start + step, model_spec.layers))
        logits = _run(source, layers, dtypes, tokens, logits)
        other = _run(written, layers, dtypes, tokens, other)
        if not _same(logits, other):
            # only the last part of the model returns logits
            last = layers.stop == model_spec.layers
            raise Unlike(
                f"{'logits' if last else f'hidden vectors behind layer {start}'} of "
                f"{written.where} differ from those of {source.where}, by up to "
                f"{float((logits - other).abs().max()):.1e}"
            )
    return "logits equal" + (" block by block" if step == 1 and model_spec.layers > 1 else "")


def _run(
    source: ModelSource,
    layers: range,
    dtypes: dict[str, torch.dtype],
    tokens: Tensor,
    x: Tensor | None,
) -> Tensor:
    """Run `layers` of the model in fp32 on CPU and return their output: hidden vectors, or logits
    after the last layer. Weights are rounded to `dtypes` first. The first layer takes `tokens`,
    later ones the hidden vectors `x`.
    """
    model_spec = source.spec
    # A model of these layers alone, as a pipeline stage has them: built without memory, then
    # filled.
    part = PipelinePart(layers, layers.start == 0, layers.stop == model_spec.layers)
    # no memory yet: only these layers are materialised below
    with torch.device("meta"):
        model = Decoder(model_spec, replace(single_process(model_spec.layers), parts=(part,)))
    model = model.to(torch.float32).to_empty(device="cpu").eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(source.read(name).to(dtypes[name]))
        # without a head function the decoder returns hidden vectors
        end: Any = head.compute_logits if part.last else None
        return model(tokens, end, x=x)


def _same(left: Tensor, right: Tensor) -> bool:
    """Return whether shape, dtype and every bit are equal, so that NaN equals itself."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    # as bytes: NaN is unequal to itself as a number, and -0.0 equal to 0.0
    return torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8),
        right.contiguous().reshape(-1).view(torch.uint8),
    )
