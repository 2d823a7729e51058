"""Processes, communication, configuration and messages: what every other package uses, without
knowing of models.

Mesh and communication
    topology.py      which rank is in which group: the only rank arithmetic
    mesh.py          `Mesh`: named axes (pp, dp, cp, tp, fsdp, ep, edp) with their process groups
    collectives.py   the five typed collectives with their backwards
    transfers.py     point-to-point and raw collectives under them
    reduction.py     sums by a tree, whose bits do not depend on who adds which part
    consensus.py     checks that all ranks are about to do the same
State and compute
    state.py         the bridge between DTensors at rest and local tensors
    autograd.py      `torch.autograd.Function` with types, and activation recomputation
    device.py        the device of a process, and the only way to read from it
    determinism.py   seeds by name; deterministic algorithms on a GPU
    profiling.py     names of the parts of a step, for a profile
    torch_private/   private names of torch and transformers, each with a reason and a test
Options, files, messages
    config.py        configuration classes: options with types, ranges and help
    environment.py   what a launcher has set in the environment, and defaults of ours
    messages.py      exceptions of commands, and the wording of options and values
    log.py           the console and units
    filesystem.py    paths as users write them, and file locks
"""
