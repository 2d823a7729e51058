"""How others in the field spell our options: what `unknown option` suggests. Data, by source; a
name is looked up whole and by its last part, so that `--training.steps` and `--lr` are found. What
other families have is read from their fields. And which option a word without one is meant as.
"""

import shlex
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from dolmen.families import families

# An option that does the same; a word after it is its value. Where several are named, the verbs
# differ: the first that the verb has is told.
EQUAL = {
    # Megatron-LM
    "tensor-model-parallel-size": ("layout.tp", "tp"),
    "pipeline-model-parallel-size": ("layout.pp", "pp"),
    "context-parallel-size": "layout.cp",
    "expert-model-parallel-size": ("layout.ep", "ep"),
    "target-tensor-parallel-size": ("layout.tp", "tp"),  # of its converter, as the next two
    "target-pipeline-parallel-size": ("layout.pp", "pp"),
    "target-expert-parallel-size": ("layout.ep", "ep"),
    "num-layers-per-virtual-pipeline-stage": "layout.virtual-stages",
    "num-virtual-stages-per-pipeline-rank": "layout.virtual-stages",
    "use-distributed-optimizer": "layout.zero 1",
    "recompute-granularity": "layout.recompute",
    "recompute-num-layers": "layout.recompute-layers",
    "recompute-activations": "layout.recompute selective",
    "num-layers": ("model.num-hidden-layers", "model.n-layer"),
    "ffn-hidden-size": ("model.intermediate-size", "model.n-inner"),
    "num-query-groups": "model.num-key-value-heads",
    "kv-channels": "model.head-dim",
    "rotary-base": "model.rope-parameters.rope-theta",
    "norm-epsilon": ("model.rms-norm-eps", "model.layer-norm-epsilon"),
    "init-method-std": "model.initializer-range",
    "hidden-dropout": "train.dropout",
    "attention-dropout": "train.dropout",
    "window-size": "model.sliding-window",
    "untie-embeddings-and-output-weights": "model.no-tie-word-embeddings",
    "add-qkv-bias": "model.attention-bias",
    "moe-router-topk": "model.num-experts-per-tok",
    "moe-ffn-hidden-size": ("model.moe-intermediate-size", "model.intermediate-size"),
    "moe-aux-loss-coeff": "train.router.aux-loss-coef",
    "moe-z-loss-coeff": "train.router.z-loss-coef",
    "seq-length": ("train.sequence-length", "window"),
    "micro-batch-size": "train.microbatch-size",
    "train-iters": "train.steps",
    "lr-decay-style": "optimizer.schedule",
    "lr-warmup-iters": "optimizer.warmup-steps",
    "adam-beta1": "optimizer.beta1",
    "adam-beta2": "optimizer.beta2",
    "adam-eps": "optimizer.eps",
    "muon-momentum": "optimizer.muon.momentum",
    "clip-grad": "optimizer.clip",
    "bf16": "train.dtype bfloat16",
    "fp16": "train.dtype float16",
    "fp8-recipe": "train.precision",
    "fp8-format": "train.fp8.format",
    "fp8-margin": "train.fp8.margin",
    "fp8-interval": "train.fp8.scale-interval",
    "fp8-amax-history-len": "train.fp8.amax-history",
    "fp8-amax-compute-algo": "train.fp8.amax-compute",
    "data-path": "data.path",
    "tokenizer-model": "data.tokenizer",
    "valid-data-path": "data.validation",
    "save-interval": "checkpoint.every",
    "eval-interval": "log.validate-every",
    "log-interval": "log.every",
    "save": "out",
    "load": "resume",
    # transformers: Trainer and its examples
    "learning-rate": "optimizer.lr",
    "per-device-train-batch-size": "train.microbatch-size",
    "max-steps": "train.steps",
    "num-train-epochs": "train.epochs",
    "warmup": "optimizer.warmup-steps",
    "lr-scheduler-type": "optimizer.schedule",
    "adam-epsilon": "optimizer.eps",
    "optim": "optimizer.name",
    "max-grad-norm": "optimizer.clip",
    "output-dir": "out",
    "overwrite-output-dir": "overwrite",
    "resume-from-checkpoint": "resume",
    "model-name-or-path": "init",
    "train-file": "data.path",
    "dataset-name": "data.path",
    "dataset": "data.path",
    "data": "data.path",
    "validation-file": "data.validation",
    "tokenizer-name": "data.tokenizer",
    "tokenizer-name-or-path": "data.tokenizer",
    "block-size": ("train.sequence-length", "window"),
    "gradient-checkpointing": "layout.recompute full",
    "torch-compile": "train.compile",
    "save-steps": "checkpoint.every",
    "save-total-limit": "checkpoint.keep",
    "eval-steps": "log.validate-every",
    "logging-steps": "log.every",
    "report-to": "log.to",
    # PEFT, and what trains with it
    "lora-r": "adapter.rank",
    "lora-rank": "adapter.rank",
    "lora-alpha": "adapter.alpha",
    "lora-target-modules": "adapter.targets",
    "target-modules": "adapter.targets",
    "lora-modules": ("adapters", "adapter.targets"),
    "lora-target-linear": "adapter.targets all-linear",
    "lora-model-dir": "adapters",
    "load-in-8bit": ("adapter.frozen int8", "weights int8"),
    # TRL
    "max-completion-length": "rollout.max-new-tokens",
    "num-ppo-epochs": "rollout.epochs",
    "epsilon": "rollout.clip-low",
    "epsilon-high": "rollout.clip-high",
    "vllm-importance-sampling-cap": "rollout.importance-sampling-cap",
    "cliprange": "rollout.clip-low",
    "cliprange-value": "critic.clip",
    "reward-funcs": "reward",
    "reward-model": "reward",
    "reward-model-path": "reward",
    "ref-model": "objective.reference",
    "assistant-only-loss": "data.masking-strategy",
    "completion-only-loss": "data.masking-strategy",
    "dataset-text-field": "data.text-field",
    "chat-template": "data.template",
    "chat-template-path": "data.template",
    # verl and OpenRLHF
    "adv-estimator": "rollout.advantage-estimator",
    "entropy-coeff": "rollout.entropy-coef",
    "filter-groups": "rollout.max-resamples",
    "dynamic-sampling": "rollout.max-resamples",
    "overlong-buffer-len": "rollout.overlong-buffer",
    "tis-imp-ratio-cap": "rollout.importance-sampling-cap",
    "max-assistant-turns": "rollout.max-turns",
    "n-samples-per-prompt": "rollout.num-generations",
    "init-kl-coef": "ppo.kl-coef",
    "target-kl": "ppo.kl-target",
    "ptx-coef": "ppo.pretraining-coef",
    # axolotl
    "base-model": "init",
    "datasets": "data.path",
    "sequence-len": ("train.sequence-length", "window"),
    "num-epochs": "train.epochs",
    "lr-scheduler": "optimizer.schedule",
    "val-set-size": "data.validation-fraction",
    "sample-packing": "data.packing",
    "train-on-inputs": "data.masking-strategy",
    "wandb-project": "log.to wandb",
    # DeepSpeed
    "zero-stage": "layout.zero",
    "gradient-clipping": "optimizer.clip",
    "num-stages": ("layout.pp", "pp"),
    "stages": ("layout.pp", "pp"),
    # torchtitan
    "tensor-parallel-degree": "layout.tp",
    "pipeline-parallel-degree": "layout.pp",
    "context-parallel-degree": "layout.cp",
    "expert-parallel-degree": "layout.ep",
    "data-parallel-replicate-degree": "layout.dp",
    "data-parallel-shard-degree": "layout.zero",
    "pipeline-parallel-schedule": "layout.schedule",
    "activation-checkpoint.mode": "layout.recompute",
    "local-batch-size": "train.microbatch-size",
    "seq-len": ("train.sequence-length", "window"),
    "max-norm": "optimizer.clip",
    "dataset-path": "data.path",
    "hf-assets-path": "init",
    "tokenizer-path": "data.tokenizer",
    "dump-folder": "out",
    "checkpoint.folder": "out",
    "checkpoint.interval": "checkpoint.every",
    "checkpoint.keep-latest-k": "checkpoint.keep",
    "validator.freq": "log.validate-every",
    "log-freq": "log.every",
    "enable-wandb": "log.to wandb",
    "compile.enable": "train.compile",
    # nanochat
    "depth": ("model.num-hidden-layers", "model.n-layer"),
    "max-seq-len": ("train.sequence-length", "window"),
    "device-batch-size": "train.microbatch-size",
    "num-iterations": "train.steps",
    "eval-every": "log.validate-every",
    "eval-tokens": "log.validation-tokens",
    "save-every": "checkpoint.every",
    "grad-clip": "optimizer.clip",
    "run": "out",
    # inference engines
    "max-tokens": "max-new-tokens",
    "max-length": "max-new-tokens",
    "num-predict": "max-new-tokens",
    "max-model-len": "max-length",  # vLLM, as the next five
    "max-num-seqs": "max-rows",
    "max-num-batched-tokens": "max-batch-tokens",
    "served-model-name": "name",
    "api-key": "key",
    "quantization": "weights",
    "num-return-sequences": "num-samples",
    # what people write without having it from anywhere
    "tensor-parallel-size": ("layout.tp", "tp"),
    "pipeline-parallel-size": ("layout.pp", "pp"),
    "data-parallel-size": "layout.dp",
    "expert-parallel-size": ("layout.ep", "ep"),
    "vocab-size": ("model.vocab-size", "size"),
    "batch-size": "train.global-batch-size",
    "context-length": ("train.sequence-length", "window"),
    "iterations": "train.steps",
    "optimizer.warmup": "optimizer.warmup-steps",
    "beta2": "optimizer.beta2",
    "model.dim": ("model.hidden-size", "model.n-embd"),
    "hidden-dim": ("model.hidden-size", "model.n-embd"),
    "n-layers": ("model.num-hidden-layers", "model.n-layer"),
    "n-heads": ("model.num-attention-heads", "model.n-head"),
    "num-heads": ("model.num-attention-heads", "model.n-head"),
    "num-kv-heads": "model.num-key-value-heads",
    "sliding-layers": "model.layer-types",
    "n-kv-heads": "model.num-key-value-heads",
    "tokenizer-dir": "data.tokenizer",
    "model": "init",
    "checkpoint": "init",
    "output": ("to", "out"),
    "num-microbatches": "microbatches",
    "chunks": "virtual-stages",
}

BATCH = (
    "gradients accumulate over train.global-batch-size / (layout.dp x train.microbatch-size) "
    "microbatches: set --train.global-batch-size and --train.microbatch-size"
)
TOKENS = (
    "a step has train.global-batch-size x train.sequence-length tokens: set "
    "--train.global-batch-size, in sequences"
)
FAMILY = "this depends on the model family: choose one with --model.model-type"
WARMUP = (
    "warm-up is set in steps or tokens: set --optimizer.warmup-steps, or --optimizer.warmup-tokens"
)
KERNELS = "the fastest suitable attention kernel is chosen automatically: leave it out"
ADAPTERS = "adapters have no dropout: leave it out"
# No option does the same: how to get it.
HOW = {
    "precision": "set --train.dtype bfloat16, and for 8-bit matrix products --train.precision",
    "gradient-accumulation-steps": BATCH,
    "gradient-accumulation": BATCH,
    "grad-accum-steps": BATCH,
    "accumulate-grad-batches": BATCH,
    "total-batch-size": TOKENS,
    "max-tokens-per-step": TOKENS,
    "warmup-ratio": WARMUP,
    "lr-warmup-fraction": WARMUP,
    "warmdown-ratio": "set --optimizer.schedule wsd and --optimizer.decay-fraction",
    "make-vocab-size-divisible-by": "any --model.vocab-size can be split: nothing is padded",
    "embedding-lr": "all parameters have one learning rate: set --optimizer.lr",
    "matrix-lr": "all parameters have one learning rate: set --optimizer.lr",
    "split": "set --data.validation-fraction, or --data.validation for files of its own, or "
    "--data.split with --data.order megatron",
    "eval-iters": "a validation reads --log.validation-tokens tokens",
    "num-nodes": "start one `dolmen train` per process with torchrun or srun",
    "nproc-per-node": "set --nproc, or --layout.tp, --layout.dp and so on, which determine it",
    "device": "dolmen takes the GPUs that are visible, else the CPU: set CUDA_VISIBLE_DEVICES",
    "normalization": FAMILY,
    "norm": FAMILY,
    "qk-norm": FAMILY,
    "qk-layernorm": FAMILY,
    "model.activation": "set --model.hidden-act, by the name that transformers has for it, such as "
    "gelu_pytorch_tanh",
    "adapter.dropout": ADAPTERS,
    "lora-dropout": ADAPTERS,
    "load-in-4bit": "frozen weights are stored in 8 bits at least: set --adapter.frozen int8",
    "flash-attention": KERNELS,
    "use-flash-attn": KERNELS,
    "attn-implementation": KERNELS,
    "betas": "set --optimizer.beta1 and --optimizer.beta2",
}

# Verb -> the options that words which belong to none are meant as, in this order.
POSITIONAL = {
    "evaluate": ("data.path",),
    "export": ("to",),
    "generate": ("prompt",),
    "convert": ("to",),
    "plan": ("cluster",),
    "tokenize": ("data.path", "to"),
    "train": ("data.path",),
    "verify": ("against",),
    "vocab train": ("data.path", "to"),
    "vocab merge": ("to",),
    "vocab extend": ("tokenizer", "to"),
}

MODEL = "model."  # before the options of a model
CRITIC = "critic."  # before those of the critic, which few runs have


def suggestion(name: str, known: Collection[str]) -> str:
    """Return the advice that ends the message `unknown option --NAME`: the option's name here, the
    right spelling, or the other way to say it; empty where nothing is close. `known` are the names
    of the command's options, without leading dashes, `-` between words.
    """
    last = name.rpartition(".")[2]
    if name in HOW or last in HOW:
        how = HOW.get(name) or HOW[last]
        # the advice is of training
        return how if "train.steps" in known else ""
    ours = [option for option in known if option.rpartition(".")[2] == last]
    ours = [option for option in ours if not option.startswith(CRITIC)] or ours
    names = EQUAL.get(name) or EQUAL.get(last) or ()
    equal = (names,) if isinstance(names, str) else names
    theirs = [option for option in equal if option.split()[0] in known]
    if options := ours or theirs[:1]:
        return _meant(options)
    if "train.steps" in known and (advice := _suggest_families((*equal, name), known)):
        return advice
    return _meant(
        get_close_matches(name, known, n=1, cutoff=0.75)
        or get_close_matches(last, [o for o in known if "." not in o], n=1, cutoff=0.7)
        or [o for near in _near(last, known) for o in known if o.rpartition(".")[2] == near]
    )


def meant_command(verb: str, argv: Sequence[str], stray: Collection[str]) -> str:
    """Return the command line with the words that belong to no option (`stray`) put behind the
    options that they are meant for, by POSITIONAL; empty where that is not clear or these options
    are already present.
    """
    present = {word.partition("=")[0].removeprefix("--").replace("_", "-") for word in argv}
    left = [option for option in POSITIONAL.get(verb, ()) if option not in present]
    # of a word that is there twice the last is stray
    places = [i for i, word in enumerate(argv) if word in stray and word not in argv[i + 1 :]]
    if not left or not places or "" in stray or "input" in present:
        return ""
    if left == ["prompt"]:  # several words are one text without its quotes
        text = " ".join(argv[i] for i in places)
        rest = [word for i, word in enumerate(argv) if i not in places]
        words = [*rest[: places[0]], "--prompt", text, *rest[places[0] :]]
    elif len(places) <= len(left) or left == ["data.path"]:  # which takes several
        options = dict(zip(places, left, strict=False))
        words = [w for i, word in enumerate(argv) for w in (*_option(options.get(i)), word)]
    else:
        return ""
    return f"dolmen {verb} {shlex.join(words)}"


def _option(name: str | None) -> tuple[str, ...]:
    """Return the option as words of a command line; none for None."""
    return () if name is None else (f"--{name}",)


def _meant(options: Collection[str]) -> str:
    """Return "did you mean --A or --B?", or "" for no option."""
    return f"did you mean {' or '.join(f'--{option}' for option in options)}?" if options else ""


def _near(last: str, known: Collection[str]) -> list[str]:
    """Return the last part of the option's names most similar to `last`, if any is close."""
    return get_close_matches(last, {option.rpartition(".")[2] for option in known}, n=1, cutoff=0.7)


def _suggest_families(options: Collection[str], known: Collection[str]) -> str:
    """Return a suggestion for a field of another model family: the name that the same field has in
    this one, or else the families that have it. Empty where no family has any of `options`.
    """
    for option in options:
        path = option.removeprefix(MODEL).removeprefix("no-").replace("-", "_")
        having = [family for family in families().values() if path in family.names]
        same = [
            n for f in having for n, field_path in f.names.items() if field_path == f.names[path]
        ]
        called = [f"{MODEL}{name.replace('_', '-')}" for name in same]
        if same_field := [name for name in called if name in known]:
            return _meant(same_field[:1])
        if having:
            names = ", ".join(family.name for family in having)
            return f"other families have {path}: choose one with --model.model-type, of {names}"
    return ""
