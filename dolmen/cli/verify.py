"""dolmen verify DIR [--against DIR2]"""

from dolmen.cli import launch
from dolmen.cli.errors import BadInput
from dolmen.cli.options import Split, VerifyOptions, message
from dolmen.convert import hf
from dolmen.core import mesh as meshes
from dolmen.core.log import console
from dolmen.evaluate.verify import verify
from dolmen.model.layout import Layout


def run(options: VerifyOptions, argv: list[str]) -> int:
    others = [options.against] if options.against else []
    return compute(
        argv,
        "verify",
        options.folder,
        options.layout,
        lambda mesh: _verify(options, mesh),
        others,
    )


def _verify(options: VerifyOptions, mesh: meshes.Mesh) -> int:
    report = verify(options.folder, options.against, mesh, length=options.length)
    console(mesh.first).print(report.table())
    return 0 if report.ok else 1


def compute(argv: list[str], verb: str, folder: str, split: Split, work, others: list[str]) -> int:
    """Run work(mesh) -> exit code on the processes `split` needs, after checking the folder: the
    way of verify and generate.
    """
    started = meshes.Launch.read()
    return start(started, argv, verb, checked(started, verb, folder, split, others), work)


def checked(
    started: meshes.Launch | None, verb: str, folder: str, split: Split, others: list[str]
) -> Layout:
    """The layout, where the folders can be read and it divides the model of the first. Raises
    BadInput.
    """
    try:
        for name in (folder, *others):
            hf.check(hf.resolve(name), hf.read_config(hf.resolve(name)))
        layout = Layout(tp=split.tp).resolve(started.world_size if started else None)
        if layout.dp != 1:
            raise ValueError(
                f"{layout.world} processes were started: {verb} is split over tp alone, set "
                f"--layout.tp {layout.world}"
            )
        layout.check(hf.read_config(hf.resolve(folder)), 1, 1, 1)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    return layout


def start(started: meshes.Launch | None, argv: list[str], verb: str, layout: Layout, work) -> int:
    """work(mesh) on the processes of `layout`, which has been checked; its exit code."""
    if started is None and layout.world > 1:
        return launch.launch(layout.world, [verb, *argv])
    return launch.guarded(lambda: _joined(started, layout, work))


def _joined(started: meshes.Launch | None, layout: Layout, work) -> int:
    device = meshes.device_for(started)
    try:
        with meshes.joined(started, device):
            return work(meshes.grid(1, layout.tp, device))
    except ValueError as error:
        raise BadInput(message(error)) from None
