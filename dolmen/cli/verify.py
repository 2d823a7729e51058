"""dolmen verify SOURCE [--against SOURCE2]"""

from typing import Protocol

from dolmen.cli.options import Split, VerifyOptions
from dolmen.conversion.source import open_alike, open_source
from dolmen.core import device as devices
from dolmen.core import mesh as meshes
from dolmen.core.errors import BadInput, message
from dolmen.core.launched import Launch
from dolmen.core.log import console
from dolmen.evaluation.verify import verify
from dolmen.families import Model, unknown
from dolmen.launch import launcher, process
from dolmen.model.layout import Layout

DEVICE = "device"


def run(options: VerifyOptions, argv: list[str]) -> int:
    others = [options.against] if options.against else []
    return compute(
        argv,
        "verify",
        options.folder,
        options,
        lambda mesh: _verify(options, mesh),
        others,
    )


def _verify(options: VerifyOptions, mesh: meshes.Mesh) -> int:
    source = open_alike(options.folder, mesh)
    against = open_alike(options.against, mesh) if options.against else None
    report = verify(source, against, mesh, length=options.length)
    console(mesh.first).print(report.table())
    return 0 if report.ok else 1


class Placed(Protocol):
    """Options that say where a verb computes."""

    @property
    def layout(self) -> Split: ...
    @property
    def device(self) -> devices.Asked: ...


def compute(argv: list[str], verb: str, folder: str, where: Placed, work, others: list[str]) -> int:
    """Run work(mesh) -> exit code on the processes that `where` asks for, after checking the
    folder: the way of verify and generate.
    """
    started = process.started()
    layout = checked(started, verb, folder, where, others)
    return start(started, argv, verb, layout, where.device, work)


def checked(
    started: Launch | None, verb: str, folder: str, where: Placed, others: list[str]
) -> Layout:
    """The layout, where the folders can be read, it divides the model of the first and there are
    the devices for it. Raises BadInput.
    """
    try:
        models = [readable(name) for name in (folder, *others)]
        layout = Layout(tp=where.layout.tp).resolve(started.world_size if started else None)
        if layout.dp != 1:
            raise ValueError(
                f"{layout.world} processes were started: {verb} is split over tp alone, set "
                f"--layout.tp {layout.world}"
            )
        layout.check(models[0].tree, 1, 1, 1)
        if started is None:
            devices.require_gpus(where.device, layout.world, DEVICE)
        else:
            devices.choose_device(where.device, started, DEVICE)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    if started is None or started.rank == 0 and not process.launched_here():
        for model in models:
            unknown.warn(model)
    return layout


def readable(name: str) -> Model:
    """The model of a source, whose weights fit it. Raises as `open_source` and `Source.specs`."""
    source = open_source(name)
    _ = source.specs
    return source.model


def start(
    started: Launch | None,
    argv: list[str],
    verb: str,
    layout: Layout,
    asked: devices.Asked,
    work,
) -> int:
    """work(mesh) on the processes of `layout`, which has been checked; its exit code."""
    if started is None and layout.world > 1:
        return launcher.launch(layout.world, [verb, *argv])
    return process.guarded(lambda: _joined(started, layout, asked, work))


def _joined(started: Launch | None, layout: Layout, asked: devices.Asked, work) -> int:
    try:
        device = devices.choose_device(asked, started, DEVICE)
        with meshes.joined(started, device):
            devices.refuse_shared_gpus(device, DEVICE)
            return work(meshes.grid(1, layout.tp, device))
    except ValueError as error:
        raise BadInput(message(error)) from None
