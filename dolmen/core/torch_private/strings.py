"""Names in torch that are known as text only: names of variables, files, loggers and ranges.
Imports nothing, so that help and the launcher do without torch.
"""

LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
"""A variable of the environment: gloo connects two ranks when they first talk. Read as each group
is made, and torch has no other way to request it. 2.11 to 2.13."""

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""A variable: how often torchrun has started the group again. Documented. 2.11 to 2.13."""

RUN = "TORCHELASTIC_RUN_ID"
"""A variable: the name of a job of torchrun, `none` where it was given none. Documented. 2.11 to
2.13."""

ONE_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""A variable: the ranks meet in the store that their launcher holds ("True"), and none of them
makes one. 2.11 to 2.13."""


TORCH = "/torch/"
"""Part of the path of every file of torch's Python. All releases."""

COLLECTIVES = "/torch/distributed/"
"""Part of the path of a file in which a process waits for others: the innermost calls of one that
does are there. 2.11 to 2.13.
"""

REDISTRIBUTE = "torch.distributed.tensor._redistribute"
"""The logger to which DTensor reports gathers which it makes one after another. 2.13."""

DYNAMO = "torch._dynamo.convert_frame"
"""The logger to which torch.compile reports its limits on programs. 2.11 to 2.13."""

GAVE_UP = "torch._dynamo hit config"
"""How that begins, followed by limit, number, function, reason as arguments. 2.11 to 2.13."""

COMPILED = "## Call CompiledFxGraph"
"""How the name of a range of torch.compile's programs begins, in a profile. On a CPU their loops
have no name. 2.11 to 2.13."""

FSDP = "FSDP::"
"""How that of a range of FSDP's begins: "FSDP::all_gather (layers.0)". 2.11 to 2.13."""
