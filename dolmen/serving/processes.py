"""A model on the processes of its layout, for verify, generate, evaluate, chat and serve.

resolve        open the models, and check them with the adapters, the layout and the devices
Resolved.run   start workers, or let this process join those of torchrun or SLURM
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dolmen.conversion.source import ModelSource, open_source, pin_source, tokenizer_folder
from dolmen.conversion.weights import check_whole
from dolmen.core import consensus
from dolmen.core import device as devices
from dolmen.core import mesh as meshes
from dolmen.core.environment import Launch
from dolmen.core.messages import as_bad_input
from dolmen.data.tokenizer import PreTrainedTokenizer, load_tokenizer
from dolmen.families import unknown
from dolmen.launch import launcher, process
from dolmen.model.layout import Layout
from dolmen.serving import adapters as multi_lora
from dolmen.serving.request import check_int8

DEVICE = "device"


@dataclass(frozen=True)
class Resolved:
    """The models of a verb, each opened once, and the layout and devices it runs on."""

    verb: str
    names: tuple[str, ...]
    """Names of the models; a run's is that of its newest checkpoint."""
    sources: tuple[ModelSource, ...]
    layout: Layout
    device: devices.DeviceChoice

    @property
    def source(self) -> ModelSource:
        """The first of the models."""
        return self.sources[0]

    def tokenizer(self) -> PreTrainedTokenizer:
        """Load the tokenizer of the first model. Raises ValueError, also where it has none."""
        return load_tokenizer(tokenizer_folder(self.source), option="")

    def run(self, options: Mapping[str, Any], work: Callable[..., int]) -> int:
        """Run `work(mesh, *sources)` on the processes of the layout, and return its exit code.

        A layout of several processes that torchrun or SLURM has not started is started here:
        workers run `dolmen verb` with `options`, as plain values.
        """
        started = process.read_launch()
        # one process needs no launcher: it works here
        if started is None and self.layout.world > 1:
            return launcher.launch(self.layout.world, [self.verb], handed=options, imports=__name__)
        return process.run_worker(lambda: self._join(started, work))

    def _join(self, started: Launch | None, work: Callable[..., int]) -> int:
        """Choose this process's device, join the process group that `started` describes (None: a
        single process), and return `work(mesh, *sources)`. A ValueError becomes BadInput, which
        ends the command with its message alone.
        """
        with as_bad_input(ValueError):
            local_device = devices.choose_device(self.device, started, DEVICE)
            with meshes.process_group_context(started, local_device):
                devices.refuse_shared_gpus(local_device, DEVICE)
                mesh = self.layout.mesh(local_device)
                return work(mesh, *self.sources_on(mesh))

    def sources_on(self, mesh: meshes.Mesh) -> tuple[ModelSource, ...]:
        """Return the models that rank 0 of the mesh has opened (collective): a save may end between
        two ranks' looks at a run's folder, so a rank with an older checkpoint opens the newer one.
        """
        if mesh.size == 1:
            return self.sources
        names = consensus.run_on_rank_zero(lambda: self.names)
        pairs = zip(self.names, names, self.sources, strict=True)
        return tuple(source if a == b else open_source(b) for a, b, source in pairs)


def resolve(
    verb: str,
    names: Sequence[str],
    layout: Layout,
    device: devices.DeviceChoice,
    replicas: bool = False,
    weights: Literal["stated", "int8"] = "stated",
    adapters: Sequence[str] = (),
) -> Resolved:
    """Open the models `names` and check them, the adapters, the layout (whose open sizes are
    resolved) and the devices before any process starts. Raises BadInput where a model cannot be
    read or lacks weights, the layout does not divide the first one, or devices are missing.

    `replicas`: the verb splits its work over dp. `weights`: how weights are held. `adapters`:
    NAME=FOLDER, for the first model.
    """
    started = process.read_launch()
    with as_bad_input():
        names = [pin_source(name) for name in names]
        sources = [open_source(name) for name in names]
        for source in sources:
            check_whole(source)
        spec = sources[0].spec
        if adapters:
            multi_lora.open_adapters(
                multi_lora.parse_adapters(adapters), sources[0], weights=weights
            )
        if weights == "int8":
            check_int8(spec, "cuda" if device == "cuda" else "cpu", sharded=False)
        # torchrun's number of processes decides a size that is left open
        layout = layout.resolve(started.world_size if started else None)
        if layout.dp != 1 and not replicas:
            raise ValueError(
                f"{layout.world} processes were started, but {verb} splits only over tp: set "
                f"--layout.tp {layout.world}"
            )
        least = layout.pp * (layout.dp or 1)  # a microbatch per stage
        # the shortest sequence that cp can split
        layout.check(spec, 2 * layout.cp, least, 1)
        if started is None:
            devices.require_gpus(device, layout.world, DEVICE)
        else:
            devices.choose_device(device, started, DEVICE)
    # once, not by every worker
    if started is None or started.rank == 0 and not process.launched_here():
        for source in sources:
            unknown.warn(source.model)
    return Resolved(verb, tuple(names), tuple(sources), layout, device)
