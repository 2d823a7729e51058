"""Megatron's checkpoints as models, read and written: one folder per rank of tensor, pipeline and
expert parallelism, as Megatron-LM (Shoeybi et al., 1909.08053; Narayanan et al., 2104.04473) has
saved them since its first release. docs/reference/formats.md draws them.

    names.py      which tensor holds which parameters, and what each generation calls it
    arguments.py  the command line that a checkpoint keeps <-> a model spec
    options.py    which options there are
    shares.py     what a rank holds of a tensor, and the tensor of all ranks; grouped experts
    scaling.py    `_extra_state`: scales of Transformer Engine, and the weights they belong to
    dist.py       torch_dist checkpoints, read                dist_export.py  written
    folders.py    where a checkpoint's ranks lie, and whether all do
    source.py     read: a ModelSource     export.py  written
"""
