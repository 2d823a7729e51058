"""dolmen verify SOURCE [--against SOURCE2]"""

from dolmen.cli.options import VerifyOptions
from dolmen.conversion.source import open_alike
from dolmen.core.config import to_dict
from dolmen.core.log import console
from dolmen.core.mesh import Mesh
from dolmen.evaluation.verify import verify
from dolmen.serving import placed


def run(options: VerifyOptions) -> int:
    folders = [options.folder, *([options.against] if options.against else [])]
    layout = placed.check("verify", folders, options.layout.tp, options.device)

    def work(mesh: Mesh) -> int:
        source = open_alike(options.folder, mesh)
        against = open_alike(options.against, mesh) if options.against else None
        report = verify(source, against, mesh, length=options.length)
        console(mesh.first).print(report.table())
        return 0 if report.ok else 1

    return placed.start("verify", to_dict(options), layout, options.device, work)
