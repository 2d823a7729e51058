"""Every private name of torch and transformers that the house uses, and every one that another
release may change: a file for each part of torch, so that nobody imports more than it uses.

    compute.py      operators, lists of tensors, the compiler
    processes.py    collectives and groups          sharding.py    DTensor and FSDP
    checkpoints.py  files of DCP                    hub.py         transformers
    dispatch.py     tensors without values, and seeing every operator
    strings.py      names known as text only: it imports nothing

No other package uses such a name (tests/test_house.py), and for each a test states what we
take it for (tests/core/test_torch_private.py): a release without it, or where it means something
else, fails there, by its name. The releases that a docstring names are those that were tried.
"""
