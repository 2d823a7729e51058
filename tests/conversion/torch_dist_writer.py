"""Writes `torch_dist.tar.xz`: tiny GPTs as Megatron-Core 0.16.1 saves them.

    pip install torch==2.13.0 megatron-core==0.16.1 psutil packaging einops numpy   # Python 3.11
    python tests/conversion/torch_dist_writer.py tests/conversion/torch_dist.tar.xz

Runs on CPUs over gloo, without GPU. Not imported by any test but for `value` and the sizes.
"""

import os
import sys
import tarfile
import tempfile
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LAYOUTS = {
    "tp1-pp1": (1, 1, "common.pt"),
    "tp2-pp1": (2, 1, "common.pt"),
    "tp1-pp2": (1, 2, "common.pt"),
    "tp2-pp2": (2, 2, "common.pt"),
    "tp2-pp1-entry": (2, 1, "entry"),
    "tp2-pp2-ranks": (2, 2, "ranks"),
}
"""Folder -> tp, pp and the form. torch_dist with `common.pt`; with an entry of bytes in its place,
as Megatron writes since July 2026 and 0.16.1 does if it is in the state; a file for each rank."""
SIZES = dict(num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2)
SIZES |= dict(kv_channels=4, ffn_hidden_size=24)
VOCAB, LENGTH = 64, 32


def value(index: torch.Tensor, key: str) -> torch.Tensor:
    """The weights at flat positions of the whole tensor of a key: exact in any float format."""
    return ((7 * index + len(key)) % 61 - 30) / 32


def arguments(tp: int, pp: int) -> Namespace:
    """The part of Megatron-LM's options that a reader needs, as its training saves them."""
    return Namespace(
        **SIZES,
        group_query_attention=True,
        swiglu=True,
        normalization="RMSNorm",
        norm_epsilon=1e-5,
        add_bias_linear=False,
        add_qkv_bias=False,
        position_embedding_type="rope",
        rotary_base=10000,
        rotary_percent=1.0,
        max_position_embeddings=LENGTH,
        untie_embeddings_and_output_weights=True,
        padded_vocab_size=VOCAB,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        params_dtype=torch.float32,
    )


def built(tp: int, pp: int) -> torch.nn.Module:
    """Megatron-Core's GPTModel, this rank's part."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **SIZES,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def fill(entry) -> None:
    """Set this rank's part of every tensor of a sharded state dict."""
    if isinstance(entry, dict | list):
        for inner in entry.values() if isinstance(entry, dict) else entry:
            fill(inner)
    elif hasattr(entry, "build"):  # [gate; up], which becomes two tensors
        fill(entry.build())
    elif hasattr(entry, "global_offset") and isinstance(entry.data, torch.Tensor):
        sizes = (1,) * entry.prepend_axis_num + tuple(entry.data.shape)
        index = torch.zeros(sizes, dtype=torch.int64)
        for dim, (size, offset, whole) in enumerate(
            zip(sizes, entry.global_offset, entry.global_shape, strict=True)
        ):
            steps = torch.arange(size) + offset
            index = index * whole + steps.view([-1 if i == dim else 1 for i in range(len(sizes))])
        with torch.no_grad():
            entry.data.copy_(value(index, entry.key).view(entry.data.shape))


def save(rank: int, port: int, tp: int, pp: int, form: str, out: Path) -> None:
    """One process of a layout."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{tp * pp}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
    )
    model = built(tp, pp)
    weights = model.sharded_state_dict()
    fill(weights)
    plain = {"args": arguments(tp, pp), "checkpoint_version": 3.0, "iteration": 5}
    if form == "ranks":
        name = f"mp_rank_{rank % tp:02d}_{rank // tp:03d}"
        (out / name).mkdir(parents=True)
        weights = model.state_dict_for_save_checkpoint()
        torch.save({**plain, "model": weights}, out / name / "model_optim_rng.pt")
    else:
        if form == "entry":
            plain = {"common_state": ShardedObject("common_state", plain, (1,), (0,), (0, 0, rank))}
        out.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save({"model": weights, **plain}, str(out))
    dist.barrier()
    if rank == 0 and form == "entry":
        (out / "common.pt").unlink(missing_ok=True)
    dist.destroy_process_group()


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, tarfile.open(target, "w:xz") as archive:
        for port, (name, (tp, pp, form)) in enumerate(LAYOUTS.items(), start=29_600):
            out = Path(folder, name, "iter_0000005")
            mp.spawn(save, (port, tp, pp, form, out), nprocs=tp * pp)
            (out.parent / "latest_checkpointed_iteration.txt").write_text("5")
            archive.add(out.parent, arcname=name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
