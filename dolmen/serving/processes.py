"""A model on the processes of its layout, for verify, generate, evaluate, chat and serve.

check_model   the sources can be read, the layout divides the model, the devices are there
run           start workers, or let this process join those of torchrun or SLURM
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from dolmen.conversion.source import open_source
from dolmen.conversion.weights import check_whole
from dolmen.core import device as devices
from dolmen.core import mesh as meshes
from dolmen.core.environment import Launch
from dolmen.core.messages import BadInput, message
from dolmen.families import Model, unknown
from dolmen.launch import launcher, process
from dolmen.model.layout import Layout
from dolmen.serving import adapters as multi_lora
from dolmen.serving.request import check_int8

DEVICE = "device"


def check_model(
    verb: str,
    sources: list[str],
    layout: Layout,
    device: devices.DeviceChoice,
    replicas: bool = False,
    weights: Literal["stated", "int8"] = "stated",
    adapters: Sequence[str] = (),
) -> Layout:
    """Check sources, adapters, layout and devices before any process starts; return the layout with
    its open sizes resolved. Raises BadInput where a source cannot be read, the layout does not
    divide the first model, or devices are missing.

    `replicas`: the verb splits its work over dp. `weights`: how weights are held. `adapters`:
    NAME=FOLDER, for the first model.
    """
    started = process.read_launch()
    try:
        models = [check_readable(name) for name in sources]
        if adapters:
            multi_lora.open_adapters(
                multi_lora.parse_adapters(adapters), open_source(sources[0]), weights=weights
            )
        if weights == "int8":
            check_int8(models[0].spec, "cuda" if device == "cuda" else "cpu", sharded=False)
        # torchrun's number of processes decides a size that is left open
        layout = layout.resolve(started.world_size if started else None)
        if layout.dp != 1 and not replicas:
            raise ValueError(
                f"{layout.world} processes were started, but {verb} splits only over tp: set "
                f"--layout.tp {layout.world}"
            )
        least = layout.pp * (layout.dp or 1)  # a microbatch per stage
        # the shortest sequence that cp can split
        layout.check(models[0].spec, 2 * layout.cp, least, 1)
        if started is None:
            devices.require_gpus(device, layout.world, DEVICE)
        else:
            devices.choose_device(device, started, DEVICE)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    # once, not by every worker
    if started is None or started.rank == 0 and not process.launched_here():
        for model in models:
            unknown.warn(model)
    return layout


def check_readable(name: str) -> Model:
    """Open a source, check that no weights are missing, and return its model. Raises as
    `open_source`.
    """
    source = open_source(name)
    check_whole(source)
    return source.model


def run(
    verb: str,
    handed: Mapping[str, Any],
    layout: Layout,
    device: devices.DeviceChoice,
    work: Callable[[meshes.Mesh], int],
) -> int:
    """Run `work(mesh)` on the processes of a checked layout, and return its exit code.

    A layout of several processes that torchrun or SLURM has not started is started here: workers
    run `dolmen verb` with the options `handed`, as plain values.
    """
    started = process.read_launch()
    # one process needs no launcher: it works here
    if started is None and layout.world > 1:
        return launcher.launch(layout.world, [verb], handed=handed)
    return process.run_worker(lambda: _join(started, layout, device, work))


def _join(
    started: Launch | None,
    layout: Layout,
    device: devices.DeviceChoice,
    work: Callable[[meshes.Mesh], int],
) -> int:
    """Choose the device, join the process group, and run `work` on the mesh. Raises BadInput for a
    ValueError.
    """
    try:
        local_device = devices.choose_device(device, started, DEVICE)
        with meshes.process_group_context(started, local_device):
            devices.refuse_shared_gpus(local_device, DEVICE)
            return work(layout.mesh(local_device))
    except ValueError as error:
        raise BadInput(message(error)) from None
