"""How torch's checkpoints (torch.distributed.checkpoint, DCP) are written: classes that its pickle
of descriptions names, and the archive that `torch.save` makes of a tensor.
"""

from torch.distributed.checkpoint.filesystem import _StorageInfo

Place = _StorageInfo
"""Where a part of a tensor lies: `relative_path`, `offset`, `length`. No public name; `.metadata`
has one of each part. 2.11 to 2.13."""

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
"""What `.metadata` names of tensors, but for their dtypes. A release that names another class
writes checkpoints that we refuse to read. 2.11 to 2.13."""

NUMBERS = "/data/"
"""In the name of the one entry of an archive of `torch.save` that holds a tensor's numbers,
uncompressed, at 64 bytes. 2.11 to 2.13."""
