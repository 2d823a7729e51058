"""Checkpoints over torch.distributed.checkpoint (DCP): saved at one layout, loaded at any other.

store.py      `Checkpoints`: save in the background, load, keep the newest
writer.py     copies tensors to host memory and writes them
memory.py     snapshots in the memory of the hosts, which outlive the workers
remote.py     checkpoints at a URL
reader.py     the reader, which executes nothing; a checkpoint as a stream of whole tensors
saved.py      what state.json keeps next to the tensors
seal.py       digests of all files, written last and compared first
metadata.py   the description of a DCP checkpoint
folders.py    names of folders, and the renames that make a save atomic
"""
