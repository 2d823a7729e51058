"""How torch's checkpoints (torch.distributed.checkpoint, DCP) are written: classes that its pickle
of descriptions names, and the archive that `torch.save` makes of a tensor.
"""

from torch._utils import _rebuild_tensor_v2
from torch.distributed.checkpoint.filesystem import _StorageInfo

Place = _StorageInfo
"""Storage location of a part of a tensor: `relative_path`, `offset`, `length`. No public name;
`.metadata` has one of each part. 2.11 to 2.13.
"""

PICKLED = frozenset(
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
) | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # of a name: torch.strided
}
"""Classes that `.metadata` names for tensors, but for their dtypes. A release that names another
class writes checkpoints that we refuse to read. 2.11 to 2.13.
"""

NUMBERS = "/data/"
"""Part of the name of the one entry of an archive of `torch.save` that holds a tensor's numbers,
uncompressed, at 64 bytes. 2.11 to 2.13."""

TENSORS = frozenset(
    ("torch._utils", name)
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
)
"""Functions that a file of `torch.save` names where a tensor is: storage, offset, shape and
strides, in elements, are the first arguments of each. v3 has the dtype too, where its storage has
none. 1.0 to 2.13."""

PARAMETERS = frozenset(
    {("torch._utils", "_rebuild_parameter"), ("torch._utils", "_rebuild_parameter_with_state")}
)
"""Functions that such a file names where a parameter is: its tensor is the first argument. 1.0 to
2.13.
"""

MAGIC = 0x1950A86A20F9469CFC6C
"""Number in the first pickle of a file from before torch 1.6, which is no archive. All
releases."""

rebuild = _rebuild_tensor_v2
"""Function that our own files name for a tensor: it stands in their pickle by reference. 1.0 to
2.13.
"""
