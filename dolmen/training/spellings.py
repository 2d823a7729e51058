"""How others in the field spell our options: what `unknown option` suggests. Data, by source; a
name is looked up whole and by its last part, so that `--training.steps` and `--lr` are found. What
other families have is read from their fields. And which option a word without one is meant as.
"""

import shlex
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from dolmen.families import families

# Our option -> those that do the same in Megatron-LM, transformers, TRL, verl, PEFT, axolotl,
# DeepSpeed, torchtitan, nanochat, vLLM and elsewhere. A word after ours is its value. Where several
# of ours are named, the verbs differ: the first that the verb has is suggested.
SYNONYMS = {
    "layout.tp or tp": "tensor-model-parallel-size target-tensor-parallel-size "
    "tensor-parallel-size",
    "layout.pp or pp": "pipeline-model-parallel-size target-pipeline-parallel-size num-stages "
    "stages pipeline-parallel-size",
    "layout.cp": "context-parallel-size context-parallel-degree",
    "layout.ep or ep": "expert-model-parallel-size target-expert-parallel-size "
    "expert-parallel-size",
    "layout.virtual-stages": "num-layers-per-virtual-pipeline-stage "
    "num-virtual-stages-per-pipeline-rank",
    "layout.zero 1": "use-distributed-optimizer",
    "layout.recompute": "recompute-granularity activation-checkpoint.mode",
    "layout.recompute-layers": "recompute-num-layers",
    "layout.recompute selective": "recompute-activations",
    "model.num-hidden-layers or model.n-layer": "num-layers depth n-layers",
    "model.intermediate-size or model.n-inner": "ffn-hidden-size",
    "model.num-key-value-heads": "num-query-groups num-kv-heads n-kv-heads",
    "model.head-dim": "kv-channels",
    "model.rope-parameters.rope-theta": "rotary-base",
    "model.rms-norm-eps or model.layer-norm-epsilon": "norm-epsilon",
    "model.initializer-range": "init-method-std",
    "train.dropout": "hidden-dropout attention-dropout",
    "model.sliding-window": "window-size",
    "model.no-tie-word-embeddings": "untie-embeddings-and-output-weights",
    "model.attention-bias": "add-qkv-bias",
    "model.num-experts-per-tok": "moe-router-topk",
    "model.moe-intermediate-size or model.intermediate-size": "moe-ffn-hidden-size",
    "train.router.aux-loss-coef": "moe-aux-loss-coeff",
    "train.router.z-loss-coef": "moe-z-loss-coeff",
    "train.sequence-length or window": "seq-length block-size sequence-len seq-len max-seq-len "
    "context-length",
    "train.microbatch-size": "micro-batch-size per-device-train-batch-size local-batch-size "
    "device-batch-size",
    "train.steps": "train-iters max-steps num-iterations iterations",
    "optimizer.schedule": "lr-decay-style lr-scheduler-type lr-scheduler",
    "optimizer.warmup-steps": "lr-warmup-iters warmup optimizer.warmup",
    "optimizer.beta1": "adam-beta1",
    "optimizer.beta2": "adam-beta2 beta2",
    "optimizer.eps": "adam-eps adam-epsilon",
    "optimizer.muon.momentum": "muon-momentum",
    "optimizer.clip": "clip-grad max-grad-norm gradient-clipping max-norm grad-clip",
    "train.dtype bfloat16": "bf16",
    "train.dtype float16": "fp16",
    "train.precision": "fp8-recipe",
    "train.fp8.format": "fp8-format",
    "train.fp8.margin": "fp8-margin",
    "train.fp8.scale-interval": "fp8-interval",
    "train.fp8.amax-history": "fp8-amax-history-len",
    "train.fp8.amax-compute": "fp8-amax-compute-algo",
    "data.path": "data-path train-file dataset-name dataset data datasets dataset-path",
    "data.tokenizer": "tokenizer-model tokenizer-name tokenizer-name-or-path tokenizer-path "
    "tokenizer-dir",
    "data.validation": "valid-data-path validation-file",
    "checkpoint.every": "save-interval save-steps checkpoint.interval save-every",
    "log.validate-every": "eval-interval eval-steps validator.freq eval-every",
    "log.every": "log-interval logging-steps log-freq",
    "out": "save output-dir dump-folder checkpoint.folder run",
    "resume": "load resume-from-checkpoint",
    "optimizer.lr": "learning-rate",
    "train.epochs": "num-train-epochs num-epochs",
    "optimizer.name": "optim",
    "overwrite": "overwrite-output-dir",
    "init": "model-name-or-path base-model hf-assets-path model checkpoint",
    "layout.recompute full": "gradient-checkpointing",
    "train.compile": "torch-compile compile.enable",
    "checkpoint.keep": "save-total-limit checkpoint.keep-latest-k",
    "log.to": "report-to",
    "adapter.rank": "lora-r lora-rank",
    "adapter.alpha": "lora-alpha",
    "adapter.targets": "lora-target-modules target-modules",
    "adapters or adapter.targets": "lora-modules",
    "adapter.targets all-linear": "lora-target-linear",
    "adapters": "lora-model-dir",
    "adapter.frozen int8 or weights int8": "load-in-8bit",
    "rollout.max-new-tokens": "max-completion-length",
    "rollout.epochs": "num-ppo-epochs",
    "rollout.clip-low": "epsilon cliprange",
    "rollout.clip-high": "epsilon-high",
    "rollout.importance-sampling-cap": "vllm-importance-sampling-cap tis-imp-ratio-cap",
    "critic.clip": "cliprange-value",
    "reward": "reward-funcs reward-model reward-model-path",
    "objective.reference": "ref-model",
    "data.masking-strategy": "assistant-only-loss completion-only-loss train-on-inputs",
    "data.text-field": "dataset-text-field",
    "data.template": "chat-template chat-template-path",
    "rollout.advantage-estimator": "adv-estimator",
    "rollout.entropy-coef": "entropy-coeff",
    "rollout.max-resamples": "filter-groups dynamic-sampling",
    "rollout.overlong-buffer": "overlong-buffer-len",
    "rollout.max-turns": "max-assistant-turns",
    "rollout.num-generations": "n-samples-per-prompt",
    "ppo.kl-coef": "init-kl-coef",
    "ppo.kl-target": "target-kl",
    "ppo.pretraining-coef": "ptx-coef",
    "data.validation-fraction": "val-set-size",
    "data.packing": "sample-packing",
    "log.to wandb": "wandb-project enable-wandb",
    "layout.zero": "zero-stage data-parallel-shard-degree",
    "layout.tp": "tensor-parallel-degree",
    "layout.pp": "pipeline-parallel-degree",
    "layout.ep": "expert-parallel-degree",
    "layout.dp": "data-parallel-replicate-degree data-parallel-size",
    "layout.schedule": "pipeline-parallel-schedule",
    "log.validation-tokens": "eval-tokens",
    "max-new-tokens": "max-tokens max-length num-predict",
    "max-length": "max-model-len",
    "max-rows": "max-num-seqs",
    "max-batch-tokens": "max-num-batched-tokens",
    "name": "served-model-name",
    "key": "api-key",
    "weights": "quantization",
    "num-samples": "num-return-sequences",
    "model.vocab-size or size": "vocab-size",
    "train.global-batch-size": "batch-size",
    "model.hidden-size or model.n-embd": "model.dim hidden-dim",
    "model.num-attention-heads or model.n-head": "n-heads num-heads",
    "model.layer-types": "sliding-layers",
    "to or out": "output",
    "microbatches": "num-microbatches",
    "virtual-stages": "chunks",
}
EQUAL = {
    theirs: tuple(ours.split(" or "))
    for ours, names in SYNONYMS.items()
    for theirs in names.split()
}
"""Their option -> ours."""

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
    """Return the advice that ends the message `unknown option --NAME`: dolmen's option for this
    name of another trainer (Megatron-LM, TRL, ...), the right spelling, or how to get the same
    otherwise; "" where nothing is close. `known`: the names of the command's options, without
    leading dashes, `-` between words.
    """
    last = name.rpartition(".")[2]
    if name in HOW or last in HOW:
        how = HOW.get(name) or HOW[last]
        # the advice is of training
        return how if "train.steps" in known else ""
    ours = [option for option in known if option.rpartition(".")[2] == last]
    ours = [option for option in ours if not option.startswith(CRITIC)] or ours
    # --model elsewhere is the model itself
    ours = [option for option in ours if not option.endswith("speculative.model")]
    equal = EQUAL.get(name) or EQUAL.get(last) or ()
    theirs = [option for option in equal if option.split()[0] in known]
    if options := ours or theirs[:1]:
        return _did_you_mean(options)
    if "train.steps" in known and (advice := _suggest_families((*equal, name), known)):
        return advice
    lasts = {option: option.rpartition(".")[2] for option in known}
    near = get_close_matches(last, {*lasts.values()}, n=1, cutoff=0.7)
    return _did_you_mean(
        get_close_matches(name, known, n=1, cutoff=0.75)
        or get_close_matches(last, [o for o in known if "." not in o], n=1, cutoff=0.7)
        or [option for option in known if lasts[option] in near]
    )


def meant_command(verb: str, argv: Sequence[str], stray: Collection[str]) -> str:
    """Return a corrected command line, as text: `argv` after `dolmen VERB`, with the option that it
    is probably meant for put before each of the `stray` words, which belong to no option (--prompt
    for `generate`, --data.path for `train`, ...). "" where that is not clear or these options are
    already present.
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
        words = [*argv]
        # from the last on, so that the places before stay where they are
        for place, option in reversed([*zip(places, left, strict=False)]):
            words.insert(place, f"--{option}")
    else:
        return ""
    return f"dolmen {verb} {shlex.join(words)}"


def _did_you_mean(options: Collection[str]) -> str:
    """Return "did you mean --A or --B?", or "" for no option."""
    return f"did you mean {' or '.join(f'--{option}' for option in options)}?" if options else ""


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
            return _did_you_mean(same_field[:1])
        if having:
            names = ", ".join(family.name for family in having)
            return f"other families have {path}: choose one with --model.model-type, of {names}"
    return ""
