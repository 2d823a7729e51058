"""The model of a source on the processes that compute with it: what verify, generate and evaluate
have in common.

    check    the sources can be read, the model divides, there are the devices
    start    workers of ours, which are handed what is asked, or this process joins the others
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from dolmen.conversion.moments import check_whole
from dolmen.conversion.source import open_source
from dolmen.core import device as devices
from dolmen.core import mesh as meshes
from dolmen.core.launched import Launch
from dolmen.core.messages import BadInput, message
from dolmen.families import Model, unknown
from dolmen.launch import launcher, process
from dolmen.model.layout import Layout
from dolmen.serving import adapters as beside
from dolmen.serving.request import check_int8

DEVICE = "device"


def check(
    verb: str,
    sources: list[str],
    layout: Layout,
    asked: devices.Asked,
    replicas: bool = False,
    weights: Literal["stated", "int8"] = "stated",
    adapters: Sequence[str] = (),
) -> Layout:
    """The layout, resolved, where the sources can be read, it divides the model of the first, and
    there are the devices for it. `replicas`: the verb shares its work over dp. `weights`: how they
    are to be held. `adapters`: NAME=FOLDER, of the first model. Raises BadInput.
    """
    started = process.started()
    try:
        models = [readable(name) for name in sources]
        if adapters:
            beside.opened(beside.named(adapters), open_source(sources[0]), weights=weights)
        if weights == "int8":
            check_int8(models[0].tree, "cuda" if asked == "cuda" else "cpu", sharded=False)
        layout = layout.resolve(started.world_size if started else None)
        if layout.dp != 1 and not replicas:
            raise ValueError(
                f"{layout.world} processes were started: {verb} is split over tp alone, set "
                f"--layout.tp {layout.world}"
            )
        least = layout.pp * (layout.dp or 1)  # a microbatch per stage
        layout.check(models[0].tree, 2 * layout.cp, least, 1)
        if started is None:
            devices.require_gpus(asked, layout.world, DEVICE)
        else:
            devices.choose_device(asked, started, DEVICE)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    if started is None or started.rank == 0 and not process.launched_here():
        for model in models:
            unknown.warn(model)
    return layout


def readable(name: str) -> Model:
    """The model of a source, whose weights fit it. Raises as `open_source` and `Source.specs`."""
    source = open_source(name)
    check_whole(source)
    return source.model


def start(
    verb: str,
    handed: Mapping[str, Any],
    layout: Layout,
    asked: devices.Asked,
    work: Callable[[meshes.Mesh], int],
) -> int:
    """work(mesh) on the processes of `layout`, which has been checked; its exit code. Workers that
    are started here do `dolmen verb`, and are `handed` its options as plain values.
    """
    started = process.started()
    if started is None and layout.world > 1:
        return launcher.launch(layout.world, [verb], handed=handed)
    return process.guarded(lambda: _joined(started, layout, asked, work))


def _joined(
    started: Launch | None,
    layout: Layout,
    asked: devices.Asked,
    work: Callable[[meshes.Mesh], int],
) -> int:
    try:
        device = devices.choose_device(asked, started, DEVICE)
        with meshes.joined(started, device):
            devices.refuse_shared_gpus(device, DEVICE)
            return work(layout.mesh(device))
    except ValueError as error:
        raise BadInput(message(error)) from None
