"""DCP's writer, with three additions: one copy is staged, one rank makes the folder, and the save
ends in a rename.

                  every rank                      rank 0 alone                  DCP sends, on the
                                                                                group of saves
    main thread   stage: copy to CPU memory
    background    plan: my part of each tensor                                  -> gather
                                                  prepare_global_plan: mkdir    -> scatter
                  write_data, fsync                                             -> gather
                                                  finish: state.json, rename    -> broadcast

`finish` runs when the results of all ranks' writes have arrived, and every rank's future resolves
after it, with the same success or the same error (torch 2.13: state_dict_saver._save_state_dict,
utils._DistWrapper.all_reduce). A replicated tensor is written by one rank, the one with least to
write (dedup_save_plans).
"""

import os
from pathlib import Path

from torch import Tensor, contiguous_format
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from dolmen.checkpoint import folders


class Writer(FileSystemWriter):
    """Writes the checkpoint of `step` into `folder`, whole or not at all. `state` is the text of
    its state.json.
    """

    def __init__(self, folder: Path, step: int, state: str, keep: int):
        # no copies ahead: the tensors are on the CPU, and DCP's thread would open a context on the
        # first GPU
        super().__init__(folder / (folders.name(step) + folders.PARTIAL), per_thread_copy_ahead=0)
        self.folder, self.step, self.state, self.keep = folder, step, state, keep

    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """One contiguous copy of this rank's part of each tensor in CPU memory; training may go on
        changing them.
        """
        return {
            n: t.detach().to("cpu", copy=True, memory_format=contiguous_format)
            for n, t in state_dict.items()
        }

    def storage_meta(self) -> StorageMeta:
        """Nothing: where the checkpoint was first written is no part of it."""
        return StorageMeta()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Rank 0 makes the folder, in the next step, which comes before anyone's writes."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        folders.clear(self.folder)
        self.path.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        with open(self.path / folders.STATE, "w", encoding="utf-8") as file:
            file.write(self.state)
            file.flush()
            os.fsync(file.fileno())
        folders.commit(self.path)
        folders.prune(self.folder, self.keep, self.step)
