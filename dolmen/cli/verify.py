"""dolmen verify SOURCE [--against SOURCE2]: the short form of `dolmen diff`, which it asks to name
the first tensor that parts where the two differ.
"""

from dolmen.comparison import diff
from dolmen.comparison.config import DiffConfig
from dolmen.conversion.source import open_alike
from dolmen.core.config import to_dict
from dolmen.core.log import console
from dolmen.core.mesh import Mesh
from dolmen.evaluation.config import VerifyConfig
from dolmen.evaluation.verify import verify
from dolmen.model.layout import Layout
from dolmen.serving import processes


def run(options: VerifyConfig) -> int:
    folders = [options.folder, *([options.against] if options.against else [])]
    layout = processes.check_model("verify", folders, Layout(tp=options.layout.tp), options.device)

    def work(mesh: Mesh) -> int:
        source = open_alike(options.folder, mesh)
        against = open_alike(options.against, mesh) if options.against else None
        report = verify(source, against, mesh, length=options.length)
        screen = console(mesh.first)
        screen.print(report.table())
        if not report.ok and mesh.size > 1:
            screen.print(f"\n`dolmen diff {_words(options)}` names the first tensor that parts")
        elif not report.ok:
            screen.print(f"\n{diff.diff(_asked(options))}", markup=False, highlight=False)
        return 0 if report.ok else 1

    return processes.run("verify", to_dict(options), layout, options.device, work)


def _asked(options: VerifyConfig) -> DiffConfig:
    """The same comparison, tensor by tensor."""
    against = f"{diff.THEIRS}:{options.against or options.folder}"
    return DiffConfig(
        options.folder,
        against,
        until="backward",
        length=options.length,
        device=options.device,
    )


def _words(options: VerifyConfig) -> str:
    asked = _asked(options)
    return f"{asked.first} {asked.second} --a.layout.tp {options.layout.tp}"
