"""Built-in runs (recipes): functions that return a RunConfig, with the model as the fields of its
config.json. Options and YAML files change them (overrides.py).

    pretraining.py  GPTs and Llamas at the sizes of papers
    overrides.py    the run of a recipe or YAML file, with options over it
"""

from collections.abc import Callable
from dataclasses import replace

from dolmen.data.config import DataConfig
from dolmen.families import model_from_fields
from dolmen.model.layout import Layout
from dolmen.optim.config import OptimizerConfig
from dolmen.recipes import pretraining
from dolmen.recipes.pretraining import large, small_llama
from dolmen.training.config import CheckpointConfig, FinishConfig, LogConfig, RunConfig, TrainConfig


def pretrain() -> RunConfig:
    """any model and data (--init, --data.path), with the low learning rate of continued
    pretraining
    """
    return RunConfig(
        name="pretrain", optimizer=OptimizerConfig(lr=5e-5, warmup_steps=10, weight_decay=0.01)
    )


def quickstart() -> RunConfig:
    """a small Llama on the Python standard library's source, data parallel over two processes; some
    3 minutes on 2 cores
    """
    model = small_llama(vocab_size=4096, shape=(256, 704, 4, 4), head_dim=64, positions=256)
    return RunConfig(
        name="quickstart",
        model=model,
        # tp 2 has collectives over gloo four times a layer, dp 2 once a step
        layout=Layout(dp=2),
        data=DataConfig(path=("python-standard-library",), tokenizer="bpe:4096"),
        optimizer=OptimizerConfig(name="muon", lr=8e-3, warmup_steps=10, schedule="linear"),
        train=TrainConfig(
            steps=320,
            sequence_length=256,
            global_batch_size=16,
        ),
        checkpoint=CheckpointConfig(every=160),
        log=LogConfig(validate_every=80, validation_tokens=32768),
        finish=FinishConfig(
            export=True, verify=True, sample="def read(self, size=-1):\n", compressors=True
        ),
    )


def _quickstart_on_this_machine(run: RunConfig, is_launched: bool) -> RunConfig:
    """Return the quickstart run adapted to this machine: without data parallelism (dp 1) if it has
    exactly one GPU, with that of its processes if it `is_launched`; in bfloat16 if it has a GPU or
    a CPU with fast bfloat16 products.
    """
    import torch  # takes a second, which --help and `dolmen recipes` do not wait for

    from dolmen.core.torch_private import compute

    gpus = torch.cuda.device_count()
    fast = torch.cuda.is_available() or compute.has_fast_bfloat16()
    # two processes cannot share one GPU over NCCL
    dp = None if is_launched else 1 if gpus == 1 else run.layout.dp
    return replace(
        run,
        layout=replace(run.layout, dp=dp),
        train=replace(run.train, dtype="bfloat16" if fast else run.train.dtype),
    )


def mixtral_8x7b() -> RunConfig:
    """the shape of Mixtral 8x7B (2401.04088): 46.7 B parameters, 12.9 B of them active per token"""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
    fields = {"vocab_size": 32000, "max_position_embeddings": 32768, **sizes, **heads, **experts}
    # the paper does not say how it was trained; as Llama 7B
    return large("mixtral-8x7b", model_from_fields("mixtral", fields), lr=3e-4, batch=512)


def qwen3_30b_a3b() -> RunConfig:
    """the shape of Qwen3 30B-A3B (2505.09388): 128 experts, 8 of them active per token"""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    experts = {"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    fields = {
        **{"vocab_size": 151936, "max_position_embeddings": 40960, **sizes, **heads, **experts},
        "rope_parameters.rope_theta": 1000000.0,
        "norm_topk_prob": True,
    }
    return large("qwen3-30b-a3b", model_from_fields("qwen3_moe", fields), lr=3e-4, batch=512)


def bert() -> RunConfig:
    """BERT base (1810.04805): masked language model of whole words, and next sentence prediction"""
    # the family's defaults are BERT base
    model = model_from_fields("bert", {"architectures": ["BertForPreTraining"]})
    # batch, steps, warm-up and rate of section A.2 of the paper
    run = large("bert", model, lr=1e-4, batch=256, length=512)
    train = replace(run.train, steps=1_000_000, microbatch_size=16, dropout=0.1)
    return replace(
        run,
        train=train,
        # BERT's tokenizer has no other end of text
        data=DataConfig(end_of_text="[SEP]"),
        optimizer=OptimizerConfig(lr=1e-4, warmup_steps=10_000, weight_decay=0.01),
    )


RECIPES: dict[str, Callable[[], RunConfig]] = {
    "quickstart": quickstart,
    "pretrain": pretrain,
    "sft": pretraining.sft,
    "reward": pretraining.reward,
    "dpo": pretraining.dpo,
    "continue-language": pretraining.continue_language,
    "grpo": pretraining.grpo,
    "ppo": pretraining.ppo,
    **pretraining.PRETRAINING,
    "mixtral-8x7b": mixtral_8x7b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "bert": bert,
}
# Recipe -> its changes for the machine that it is trained on; True: the number of processes is
# decided already.
ON_THIS_MACHINE: dict[str, Callable[[RunConfig, bool], RunConfig]] = {
    "quickstart": _quickstart_on_this_machine
}
# Recipe with a model -> its changes where --init names another model.
WITH_INIT: dict[str, Callable[[RunConfig], RunConfig]] = {"ppo": pretraining.ppo_with_init}
