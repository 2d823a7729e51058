"""dolmen serve MODEL"""

from importlib.util import find_spec

from dolmen.core.config import to_dict
from dolmen.core.mesh import Mesh
from dolmen.core.messages import BadInput, message
from dolmen.launch import process
from dolmen.model.layout import Layout
from dolmen.serving import processes
from dolmen.serving.http.config import ServeConfig

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def run(options: ServeConfig) -> int:
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        raise BadInput(f"{lacking[0]} is not installed: pip install 'dolmen[serve]'")
    from dolmen.serving.http import server  # an extra

    layout = processes.check_model(
        "serve",
        [options.folder],
        Layout(tp=options.layout.tp),
        options.device,
        adapters=options.adapters,
        weights=options.weights,
    )
    if not process.launched_here():
        try:
            server.check(options)
        except (ValueError, KeyError, OSError) as error:
            raise BadInput(message(error)) from None

    def work(mesh: Mesh) -> int:
        server.serve(options, mesh)
        return 0

    return processes.run("serve", to_dict(options), layout, options.device, work)
