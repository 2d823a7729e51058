"""The command line as a user meets it: verbs, help, option names (frozen), and what wins
over what.
"""

import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import tinyrun
import torch
import yaml
from tinyrun import dolmen

import dolmen as package
from dolmen.cli import VERBS
from dolmen.cli.command import CONFIGS, PARTS, read, read_handed
from dolmen.cli.command import find as find_class
from dolmen.cli.parse import groups, names
from dolmen.cli.parse import options as options_by_name
from dolmen.cli.runs import SHORT, model_groups, parse_run, run_options
from dolmen.core.config import to_dict
from dolmen.core.messages import BadInput
from dolmen.families import ModelConfig
from dolmen.launch import launcher
from dolmen.recipes import RECIPES
from dolmen.training.spellings import EQUAL, HOW, POSITIONAL, meant_command, suggestion

material, one_thread = tinyrun.material, tinyrun.one_thread

# What people type and write in scripts. To add one is free; to rename or remove one breaks
# somebody.
BEFORE = """
    help init reward environment out resume no-resume overwrite no-overwrite nproc max-restarts
    launch spares no-spares model.model-type
"""
# of the model: the fields of its config.json, for a family of each kind
LLAMA = """
    model.vocab-size model.hidden-size model.intermediate-size model.num-hidden-layers
    model.num-attention-heads model.num-key-value-heads model.head-dim model.hidden-act
    model.max-position-embeddings model.rms-norm-eps model.initializer-range
    model.tie-word-embeddings model.no-tie-word-embeddings
"""
ROPE = """
    model.rope-parameters.rope-theta model.rope-parameters.rope-type model.rope-parameters.factor
    model.rope-parameters.low-freq-factor model.rope-parameters.high-freq-factor
    model.rope-parameters.original-max-position-embeddings model.rope-parameters.beta-fast
    model.rope-parameters.beta-slow model.rope-parameters.attention-factor
    model.rope-parameters.mscale model.rope-parameters.mscale-all-dim
"""
MODELS = {
    "llama": f"""
        {LLAMA} model.attention-bias model.no-attention-bias model.mlp-bias model.no-mlp-bias {ROPE}
    """,
    "gpt2": """
        model.vocab-size model.n-positions model.n-embd model.n-layer model.n-head model.n-inner
        model.activation-function model.layer-norm-epsilon model.initializer-range
        model.tie-word-embeddings model.no-tie-word-embeddings
    """,
    # fields of our own
    "baichuan": """
        model.vocab-size model.hidden-size model.intermediate-size model.num-hidden-layers
        model.num-attention-heads model.hidden-act model.max-position-embeddings
        model.model-max-length model.z-loss-weight model.head model.positions model.rms-norm-eps
        model.initializer-range model.tie-word-embeddings model.no-tie-word-embeddings
    """,
    "qwen3": f"""
        {LLAMA} model.sliding-window model.use-sliding-window model.no-use-sliding-window
        model.max-window-layers model.layer-types model.attention-bias model.no-attention-bias
        {ROPE}
    """,
    "mixtral": f"""
        {LLAMA} model.sliding-window model.num-local-experts model.num-experts-per-tok
        model.router-aux-loss-coef {ROPE}
    """,
    "qwen3_moe": f"""
        {LLAMA} model.sliding-window model.num-local-experts model.num-experts-per-tok
        model.router-aux-loss-coef model.attention-bias model.no-attention-bias
        model.use-sliding-window model.no-use-sliding-window model.moe-intermediate-size
        model.norm-topk-prob model.no-norm-topk-prob model.decoder-sparse-step
        model.mlp-only-layers {ROPE}
    """,
    "falcon": f"""
        model.vocab-size model.hidden-size model.num-hidden-layers model.num-attention-heads
        model.num-kv-heads model.new-decoder-architecture model.no-new-decoder-architecture
        model.multi-query model.no-multi-query model.parallel-attn model.no-parallel-attn
        model.num-ln-in-parallel-attn model.bias model.no-bias model.alibi model.no-alibi
        model.ffn-hidden-size model.activation model.max-position-embeddings
        model.layer-norm-epsilon model.initializer-range model.tie-word-embeddings
        model.no-tie-word-embeddings {ROPE}
    """,
    "bloom": """
        model.vocab-size model.hidden-size model.n-layer model.n-head model.seq-length
        model.apply-residual-connection-post-layernorm
        model.no-apply-residual-connection-post-layernorm model.layer-norm-epsilon
        model.initializer-range model.tie-word-embeddings model.no-tie-word-embeddings
    """,
    "gpt_neox": f"""
        model.vocab-size model.hidden-size model.num-hidden-layers model.num-attention-heads
        model.intermediate-size model.hidden-act model.use-parallel-residual
        model.no-use-parallel-residual model.attention-bias model.no-attention-bias
        model.max-position-embeddings model.layer-norm-eps model.initializer-range
        model.tie-word-embeddings model.no-tie-word-embeddings {ROPE}
        model.rope-parameters.partial-rotary-factor
    """,
    "mpt": """
        model.vocab-size model.expansion-ratio model.d-model model.n-layers model.n-heads
        model.max-seq-len model.layer-norm-epsilon model.initializer-range model.tie-word-embeddings
        model.no-tie-word-embeddings model.attn-config.clip-qkv model.attn-config.softmax-scale
    """,
    "gemma2": f"""
        {LLAMA.replace("hidden-act", "hidden-activation")} model.sliding-window model.attention-bias
        model.no-attention-bias model.layer-types model.query-pre-attn-scalar
        model.attn-logit-softcapping model.final-logit-softcapping {ROPE}
    """,
    "deepseek_v3": f"""
        model.vocab-size model.hidden-size model.intermediate-size model.num-hidden-layers
        model.num-attention-heads model.hidden-act model.max-position-embeddings model.rms-norm-eps
        model.initializer-range model.tie-word-embeddings model.no-tie-word-embeddings
        model.num-key-value-heads model.q-lora-rank model.kv-lora-rank model.qk-nope-head-dim
        model.qk-rope-head-dim model.v-head-dim model.attention-bias model.no-attention-bias
        model.moe-intermediate-size model.n-shared-experts model.routed-scaling-factor
        model.first-k-dense-replace model.aux-loss-alpha model.n-routed-experts
        model.num-experts-per-tok model.n-group model.topk-group model.norm-topk-prob
        model.no-norm-topk-prob model.rope-interleave model.no-rope-interleave
        model.num-nextn-predict-layers {ROPE}
    """,
}
LAYOUT = """
    layout.tp layout.cp layout.pp layout.dp layout.ep layout.zero layout.sequence-parallel
    layout.no-sequence-parallel layout.context layout.schedule layout.virtual-stages
    layout.recompute layout.recompute-layers layout.reduction
"""
JOB = """
    help nodes nproc-per-node out file submit no-submit max-restarts grace-seconds
"""
AFTER = f"""
    adapter.rank adapter.alpha adapter.targets adapter.frozen adapter.scaling adapter.kind {LAYOUT}
    data.path data.tokenizer data.end-of-text data.text-field data.cache data.workers
    data.document-mask data.no-document-mask data.validation data.validation-fraction
    data.order data.masked-fraction data.rows data.template data.masking-strategy data.packing
    data.no-packing data.max-row-bytes data.split objective.name objective.beta
    objective.loss-type objective.label-smoothing objective.rpo-alpha objective.reference
    objective.margin objective.desirable-weight objective.undesirable-weight
    objective.center-rewards-coefficient rollout.num-generations rollout.prompts rollout.epochs
    rollout.max-new-tokens rollout.temperature rollout.loss-type
    rollout.importance-sampling-level rollout.clip-low rollout.clip-high rollout.beta
    rollout.advantage-estimator rollout.entropy-coef rollout.scale-rewards
    rollout.reward-kl-coef rollout.max-resamples rollout.overlong-buffer
    rollout.overlong-penalty-factor rollout.mask-truncated-completions
    rollout.no-mask-truncated-completions rollout.importance-sampling-cap
    rollout.max-off-policy-steps rollout.tp rollout.max-num-seqs rollout.weights
    rollout.compile rollout.no-compile rollout.offload
    rollout.routing-replay rollout.no-routing-replay rollout.max-turns rollout.timeout-seconds
    rollout.on-failure rollout.log-completions
    rollout.speculative.method rollout.speculative.num-speculative-tokens
    rollout.speculative.prompt-lookup-max rollout.speculative.prompt-lookup-min
    rollout.speculative.model
    ppo.kl-estimator ppo.kl-coef ppo.kl-target ppo.kl-horizon ppo.reward-clip
    ppo.gamma ppo.lam ppo.whiten-advantages ppo.no-whiten-advantages ppo.dual-clip
    ppo.pretraining-coef ppo.pretraining-path
    critic.init critic.lr critic.warmup-steps critic.clip
    optimizer.name optimizer.lr optimizer.warmup-steps optimizer.warmup-tokens optimizer.schedule
    optimizer.min-lr
    optimizer.decay-fraction optimizer.weight-decay optimizer.beta1 optimizer.beta2 optimizer.eps
    optimizer.clip optimizer.from-init optimizer.no-from-init optimizer.muon.momentum
    optimizer.muon.dtype train.steps train.tokens train.epochs train.seed train.dtype
    train.precision train.numerics train.sequence-length train.global-batch-size
    train.microbatch-size
    train.device train.dropout train.compile train.no-compile train.attention train.deterministic
    train.no-deterministic train.spike train.spike-factor train.max-skipped-steps train.hang-seconds
    train.fp8.format train.fp8.unrounded train.fp8.first-layers train.fp8.last-layers
    train.fp8.amax-history train.fp8.amax-compute train.fp8.margin train.fp8.scale-interval
    train.exact.tp train.exact.cp train.router.balance train.router.aux-loss-coef
    train.router.z-loss-coef train.router.bias-rate train.new-rows.share train.new-rows.first
    checkpoint.every checkpoint.keep checkpoint.snapshot-every checkpoint.to
    log.verbose log.no-verbose log.every log.validate-every log.profile log.to
    log.validate-sources log.no-validate-sources
    log.validation-tokens
    evaluate.tasks evaluate.num-fewshot evaluate.limit evaluate.apply-chat-template
    evaluate.no-apply-chat-template evaluate.tasks-path evaluate.every evaluate.samples
    evaluate.max-new-tokens evaluate.temperature evaluate.seed
    finish.export finish.no-export finish.verify finish.no-verify finish.sample finish.compressors
    finish.no-compressors
"""
FAMILIES = {name: f"{BEFORE} {of} {AFTER}".split() for name, of in MODELS.items()}
TRAIN = FAMILIES["llama"]
SAMPLING = (
    "max-new-tokens min-new-tokens temperature top-k top-p min-p repetition-penalty "
    "presence-penalty frequency-penalty logit-bias"
)
SPECULATIVE = (
    "speculative.method speculative.num-speculative-tokens speculative.prompt-lookup-max "
    "speculative.prompt-lookup-min speculative.model"
)
OTHERS = {
    "export": "help to dtype adapters no-adapters critic no-critic",
    "convert": "help to tp pp virtual-stages ep spec dtype vocab-size threads",
    "verify": "help against length device layout.tp",
    "diff": (
        f"help until length device json a.dtype {LAYOUT.replace('layout.', 'a.layout.')} "
        f"b.dtype {LAYOUT.replace('layout.', 'b.layout.')} optimizer.lr optimizer.weight-decay "
        "optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.clip"
    ),
    "generate": (
        f"help {SAMPLING} dtype weights device compile no-compile prompt input output "
        "adapters adapter stop num-samples best reward logprobs max-input-tokens max-row-bytes "
        f"resume no-resume skip-bad no-skip-bad max-batch-tokens seed {SPECULATIVE} "
        "layout.tp layout.pp layout.dp"
    ),
    "chat": (
        f"help {SAMPLING} dtype weights device compile no-compile system stop seed {SPECULATIVE}"
    ),
    "serve": (
        "help dtype weights device compile no-compile host port key key-file name adapters "
        "max-length max-rows max-waiting max-batch-tokens max-cache-tokens max-body-bytes "
        "max-connections "
        f"max-head-bytes head-time time-limit grace {SPECULATIVE} layout.tp"
    ),
    "evaluate": (
        "help tasks num-fewshot limit apply-chat-template no-apply-chat-template tasks-path dtype "
        "weights device window stride json data.path data.tokenizer data.end-of-text "
        "data.text-field data.cache data.workers layout.tp layout.cp layout.pp layout.dp layout.ep"
    ),
    "tokenize": (
        "help to data.path data.tokenizer data.end-of-text data.text-field data.cache data.workers"
    ),
    "vocab train": "help size kind to max-bytes seed data.path data.text-field",
    "vocab merge": "help to data.path data.text-field",
    "vocab extend": "help tokenizer to init seed window data.path data.text-field",
    "launch slurm": f"{JOB} sbatch",
    "launch kubeflow": f"{JOB} image namespace runtime volume mount",
    "launch skypilot": f"{JOB} accelerator volume mount setup",
    "plan": (
        "help cluster top headroom explain no-explain dryrun no-dryrun tokens rent node-price "
        "years kilowatt-hour as-recipe json report measure no-measure inference no-inference batch "
        "length layout.tp layout.cp layout.pp layout.dp layout.ep layout.zero "
        "layout.sequence-parallel layout.no-sequence-parallel layout.context layout.schedule "
        "layout.virtual-stages "
        "layout.recompute layout.recompute-layers train.global-batch-size train.sequence-length "
        "train.microbatch-size train.dtype train.dropout train.compile train.no-compile"
    ),
    "show": "help out serve no-serve host port every",
    "replay": f"help step {LAYOUT}",
    "schedule": (
        "help pp microbatches virtual-stages out list no-list forward backward input weight send "
        "costs memory"
    ),
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """Recipes without --out mean runs/NAME, which `make quickstart` leaves in the checkout."""
    monkeypatch.chdir(tmp_path)


def options(text: str) -> list[str]:
    """Names of the options of a help text, in its order; their lines begin with a dash, those of
    their texts are indented.
    """
    return re.findall(
        r"--([a-z][a-z0-9.-]*)",
        "\n".join(line for line in text.splitlines() if re.match(r"  -", line)),
    )


def options_of(name: str, verb: str = "train") -> list[str]:
    """What suggestions are made of."""
    model = ModelConfig({"model_type": name})
    own, family = run_options(verb), model_groups(model)
    return names([*own.values(), *options_by_name(family).values()])


def names_of(cls: type) -> list[str]:
    return names(options_by_name(groups(cls)).values())


@cache
def known_options() -> list[list[str]]:
    """Option names of `train` with each family, and of each other verb."""
    return [*map(options_of, FAMILIES), *map(names_of, map(find_class, CONFIGS.values()))]


@pytest.mark.parametrize("name", FAMILIES)
def test_options_of_train_are_frozen(name):
    shown = dolmen("train", "pretrain", "--model.model-type", name, "--help", "--all")
    assert shown.code == 0 and options(shown.out) == FAMILIES[name]
    assert sorted(options_of(name)) == sorted(FAMILIES[name])


def test_options_of_dryrun_are_those_of_train_and_its_own():
    """What is done with the folder and the processes of a run is none of them."""
    handling = {"out", "resume", "no-resume", "overwrite", "no-overwrite"}
    handling |= {"nproc", "max-restarts", "launch", "spares", "no-spares"}
    own = {"ranks", "device", "exact", "no-exact", "max-load", "json"}
    shown = dolmen("dryrun", "pretrain", "--model.model-type", "llama", "--help")
    assert shown.code == 0
    assert {*options(shown.out)} == {*options_of("llama", "dryrun")}
    assert {*options(shown.out)} == {*TRAIN} - handling | own


@pytest.mark.parametrize("verb", OTHERS)
def test_options_of_other_verbs_are_frozen(verb):
    shown = dolmen(*verb.split(), "--help")
    assert "(default: )" not in shown.out  # of an option that may be left out
    assert shown.code == 0 and options(shown.out) == OTHERS[verb].split()
    named, _, part = verb.partition(" ")
    known = PARTS[named][1][part] if part else CONFIGS[named]
    assert sorted(names_of(find_class(known))) == sorted(OTHERS[verb].split())


def test_help_imports_neither_torch_nor_transformers():
    """Whoever asks what can be said does not wait seconds for what computes it; nor does a mistyped
    option.
    """
    code = """
import sys
from dolmen.cli import VERBS, main
from dolmen.recipes import RECIPES
from dolmen.training.spellings import EQUAL, HOW, suggestion
asked = [*([verb, "--help"] for verb in VERBS), *(["train", name, "--help"] for name in RECIPES),
         ["train", "llama-8b", "--train.step", "5"], ["train", "llama-9b"], ["export"], ["recipes"]]
for words in asked:
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    heavy = {"torch", "transformers", "datasets", "tokenizers", "matplotlib", "numpy"}
    assert code == (0 if {"--help", "recipes"} & {*words} else 2), (words, code)
    assert not heavy & set(sys.modules), (words, heavy & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Modules of ours that help imports, and which of these two packages: most of its 0.05 s of CPU, and
# of a run's 0.3 s. Families are not counted: one is a module, and their number grows.
IMPORTED = {"--help": (12, set()), "train --help": (75, set())}


@pytest.mark.parametrize("words", IMPORTED)
def test_help_imports_few_modules(words):
    """An import more at the top of what help reads is seen here, and not in seconds. Nor does it
    look for plugins of pydantic in all that is installed.
    """
    code = f"""
import importlib.metadata, sys
importlib.metadata.distributions = None
from dolmen.cli import main
try:
    main({words.split()})
except SystemExit:
    pass
print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "usage: dolmen" in done.stdout, done.stderr
    imported = done.stderr.split()
    ours = [name for name in imported if re.match(r"dolmen(?!\.families\.)", name)]
    most, packages = IMPORTED[words]
    assert len(ours) <= most, ours
    assert {"torch", "yaml"} & {*imported} == packages


def test_what_a_process_imports_is_not_searched_for_garbage():
    """Seldom while it imports, and nothing of it at exit; the exit code is that of the command."""
    code = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_threshold()[0], gc.get_freeze_count() > len(gc.get_objects())))
sys.argv = ["dolmen", "no-verb"]
from dolmen.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "there is no verb 'no-verb'" in done.stderr
    assert done.stdout == "100000 True\n"


OPTION_NAMES = {*sum(FAMILIES.values(), []), *" ".join(OTHERS.values()).split()}


@pytest.mark.slow
@pytest.mark.parametrize("spelling", EQUAL)
def test_other_spellings_lead_to_our_options(spelling):
    """Every option that a suggestion names exists, and each suggestion is made by a verb that has
    it; none is for a name that we have ourselves.
    """
    targets = EQUAL[spelling]
    assert {target.split()[0] for target in targets} <= OPTION_NAMES
    assert spelling not in OPTION_NAMES - {
        "output",
        "max-length",
        "vocab-size",
    }  # of `generate`, `serve` and `convert` alone
    reported = [suggestion(spelling, options) for options in known_options()]
    assert f"did you mean --{targets[0]}?" in reported, reported


@pytest.mark.parametrize("spelling", HOW)
def test_advice_names_options_that_exist(spelling):
    text = HOW[spelling]
    named = re.findall(r"--([a-z][a-z0-9.-]*[a-z0-9])", text)
    assert set(named) <= OPTION_NAMES and suggestion(spelling, TRAIN) == text
    assert set(re.findall(r"\b((?:train|layout|data)\.[a-z-]+)", text)) <= set(TRAIN)
    assert suggestion(spelling, OTHERS["export"].split()) == ""


@pytest.mark.parametrize(
    "words, said",
    [
        ("train quickstart --optimizer.learning-rate 1e-3", "did you mean --optimizer.lr?"),
        ("train quickstart --learning_rate=1e-3", "did you mean --optimizer.lr?"),
        ("train quickstart --lr 1e-3", "--lr: did you mean --optimizer.lr?"),
        ("train quickstart --batch-size 8", "did you mean --train.global-batch-size?"),
        ("train quickstart --model.num-layers 2", "did you mean --model.num-hidden-layers?"),
        ("train gpt3-175b --model.num-layers 2", "did you mean --model.n-layer?"),
        (
            "train quickstart --model.sliding-window 4",
            "other families have sliding_window: choose one with --model.model-type, of cohere2",
        ),
        ("train quickstart --model.n-embd 4", "did you mean --model.hidden-size?"),
        (
            "train gpt3-175b --model.sliding-layers 4",
            "other families have layer_types: choose one with --model.model-type, of cohere2",
        ),
        ("train quickstart --model.qk-norm", "choose one with --model.model-type"),
        ("train quickstart --max-steps 2", "did you mean --train.steps?"),
        ("train quickstart --tensor-parallel-size 2", "did you mean --layout.tp?"),
        ("train quickstart --training.seq-len 2", "did you mean --train.sequence-length?"),
        ("train quickstart --bf16", "did you mean --train.dtype bfloat16?"),
        (
            "train quickstart --every 2",
            "did you mean --checkpoint.every or --log.every or --evaluate.every?",
        ),
        ("train quickstart --optimiser.lr 2", "did you mean --optimizer.lr?"),
        ("train quickstart --train.stesp 2", "did you mean --train.steps?"),
        (
            "train quickstart --qqqq 2",
            "unknown option --qqqq: dolmen train --help --all lists them",
        ),
        (
            "train quickstart --gradient-accumulation-steps 4",
            "gradients accumulate over train.global-batch-size / (layout.dp x "
            "train.microbatch-size) microbatches: set --train.global-batch-size",
        ),
        ("generate model --promt a", "unknown option --promt: did you mean --prompt?"),
        ("generate model --prompt a --max_tokens 3", "did you mean --max-new-tokens?"),
        ("verify model --tensor-parallel-size 2", "did you mean --layout.tp?"),
        ("export run --output x", "did you mean --to?"),
        (
            "evaluate m a.txt",
            "a.txt is not an option: did you mean dolmen evaluate m --data.path a.txt",
        ),
        ("export run dir --dtype float32", "did you mean dolmen export run --to dir --dtype float"),
        ("generate m Once upon", "did you mean dolmen generate m --prompt 'Once upon'"),
        ("vocab train a.txt", "did you mean dolmen vocab train --data.path a.txt"),
        ("vocab train --vocab-size 300", "did you mean --size?"),
        ("serve m --lora-modules a=b", "did you mean --adapters?"),
        ("convert a b --target-tensor-parallel-size 2", "did you mean --tp?"),
        ("train quickstart --target-tensor-parallel-size 2", "did you mean --layout.tp?"),
        ("convert a b --stages 2", "did you mean --pp?"),
        ("train quickstart --stages 2", "did you mean --layout.pp?"),
        ("train quickstart --model x", "did you mean --init?"),
        ("train quickstart --name x", "--name is"),
        ("train quickstart --log.to", "--log.to needs a value"),
        ("schedule 1f1b --num-microbatches 2", "did you mean --microbatches?"),
        ("recipes more", "more is not an option: dolmen recipes --help lists them"),
        ("recipes --all", "unknown option --all: dolmen recipes --help lists them"),
        (
            "generate m --promt a --max_tokens 3",
            "unknown options --promt (did you mean --prompt?), --max-tokens (did you mean --max-",
        ),
        (
            "train quickstart --max-steps 2 --train.stesp 3 --qqqq",
            "unknown options --max-steps (did you mean --train.steps?), --train.stesp (did you "
            "mean --train.steps?), --qqqq (dolmen train --help --all lists them)",
        ),
        ("train --init m --train.steps 2", "first: dolmen train pretrain --init MODEL"),
    ],
)
def test_an_unknown_option_is_told_with_the_one_that_is_meant(words, said):
    shown = dolmen(*words.split())
    assert shown.code == 2 and said in shown.err and not shown.out
    verb = " ".join(words.split()[: 2 if words.startswith("vocab") else 1])
    assert shown.err.startswith(f"dolmen {verb}: ") and shown.err.count("\n") == 1


@pytest.mark.parametrize("verb", POSITIONAL)
def test_words_without_an_option_are_meant_as_options_that_exist(verb):
    assert {*POSITIONAL[verb]} <= {*(TRAIN if verb == "train" else OTHERS[verb].split())}


@pytest.mark.parametrize(
    "verb, argv, stray, command",
    [
        ("export", ["x", "x"], ["x"], "dolmen export x --to x"),
        ("tokenize", ["a", "b"], ["a", "b"], "dolmen tokenize --data.path a --to b"),
        ("tokenize", ["--to", "b", "a c"], ["a c"], "dolmen tokenize --to b --data.path 'a c'"),
        ("evaluate", ["m", "a", "b"], ["a", "b"], "dolmen evaluate m --data.path a b"),
        ("export", ["m", "--to", "a", "b"], ["b"], ""),  # which of the two is meant?
        ("export", ["m", "a", "b"], ["a", "b"], ""),
        ("generate", ["m", "--input", "a.jsonl", "b"], ["b"], ""),
        ("serve", ["m", "a"], ["a"], ""),
        ("export", ["m", ""], [""], ""),
    ],
)
def test_words_without_an_option_are_given_theirs(verb, argv, stray, command):
    assert meant_command(verb, argv, stray) == command


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def test_options_that_the_pages_name_exist():
    """A name with `.`, `-` or `*` behind it stands for a group; a family has model options of its
    own, which its rows in docs/reference/families.md name.
    """
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`--(\w+\.[\w-]*[\w])(?![\w.*-])", page.read_text())
    }
    assert len(named) > 100
    unknown = named - OPTION_NAMES
    assert sorted(name for name in unknown if not name.startswith("model.")) == []


def test_every_option_is_explained():
    """A docstring is the help: an option without one shows its default and nothing else."""
    shown = dolmen("train", "quickstart", "--help", "--all").out
    for entry in re.split(r"\n  (?=--[a-z])", shown)[1:]:
        text = " ".join(entry.split("\n\n")[0].split("\n", 1)[1].split())
        assert len(re.sub(r"\(default: .*?\)", "", text).split()) > 1, entry
    assert "(default: 0.008)" in shown and "bpe:4096" in shown  # the recipe's own defaults
    nothing_named = dolmen("train", "--help").out
    assert "RECIPE: a built-in recipe (dolmen recipes) or a YAML file" in nothing_named
    assert not re.search(r"\bpretrain\b", nothing_named)


@pytest.mark.parametrize("name", SHORT)
def test_a_recipe_of_tuning_has_a_short_help(name):
    """A screen: up to 16 options that there are, with the recipe's own defaults, and a command
    that parses; and with --all every option.
    """
    shown = dolmen("train", name, "--help")
    found = re.findall(r"(?m)^  --(\S+)", shown.out)
    assert shown.code == 0 and found == [*SHORT[name].options] and len(found) <= 16
    assert {*found} <= {*TRAIN} and SHORT[name].required <= {*found}
    example = SHORT[name].example.format(name=name)
    assert max(map(len, shown.out.splitlines())) <= 100 and example in shown.out
    recipe = to_dict(RECIPES[name]())
    assert "(needed)" in shown.out
    assert f"[{recipe['optimizer']['lr']:g}]" in shown.out
    assert f"[{recipe['train']['global_batch_size']}]" in shown.out
    words = shlex.split(example)
    assert words[:3] == ["dolmen", "train", name]
    assert {word.removeprefix("--") for word in words if word.startswith("--")} <= {*found}
    assert {f"--{one}" for one in SHORT[name].required} <= {*words}
    whole = dolmen("train", name, "--help", "--all")
    assert whole.code == 0 and options(whole.out) == TRAIN


def test_the_short_help_of_pretraining_has_every_axis_of_few_gpus():
    assert {"layout.tp", "layout.dp", "layout.pp"} <= {*SHORT["pretrain"].options}


def test_the_short_help_is_made_of_the_help_of_the_options():
    """The first sentence of an option, and its choices; the rows are those of the recipe's data."""
    shown = " ".join(dolmen("train", "grpo", "--help").out.split())
    assert (
        "--rollout.loss-type Policy loss (grpo, bnpo, dr-grpo, dapo, gspo, cispo) [grpo] " in shown
    )
    assert "--optimizer.lr Peak learning rate [1e-06] " in shown
    assert "--data.path Rows with a `prompt` or `messages` (needed) " in shown


def test_the_example_of_a_recipe_has_what_its_run_needs():
    """A model to start from where the recipe has none, a tokenizer where its model is new."""
    for name, needed in (
        ("pretrain", "--init MODEL"),
        ("continue-language", "--init MODEL"),
        ("llama-8b", "--data.tokenizer DIR"),
        ("quickstart", ""),
    ):
        shown = dolmen("train", name, "--help").out
        assert f"  dolmen train {name} --data.path text/ {needed}".rstrip() + "\n" in shown
        assert {
            *re.findall(r"--(init|data.tokenizer) [^(]*?\(needed\)", " ".join(shown.split()))
        } <= {needed.partition(" ")[0].strip("-")}, name
    assert "docs/how-to/vocabulary.md" in dolmen("train", "continue-language", "--help").out


@pytest.mark.parametrize("columns", [60, 80])
def test_help_fits_a_narrow_terminal(columns, monkeypatch):
    """Indented commands, which are copied, are not wrapped."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (("train", "sft"), ("train", "llama-8b"), ("serve",), ("vocab",)):
        lines = dolmen(*words, "--help").out.splitlines()
        assert [x for x in lines if len(x) > columns and "  dolmen " not in x] == []


def test_every_run_has_a_short_help(tmp_path):
    """Of a recipe without one of its own, and of a file, that of its objective."""
    for name in RECIPES:
        shown = dolmen("train", name, "--help").out
        assert shown.startswith(f"usage: dolmen train {name} ") and shown.count("\n") < 35
    (tmp_path / "run.yaml").write_text("objective: {name: dpo}\ndata: {rows: pairs}\n")
    assert "--objective.beta" in dolmen("train", str(tmp_path / "run.yaml"), "--help").out


def test_the_short_help_of_ppo_has_the_defaults_of_its_start():
    alone = dolmen("train", "ppo", "--help").out
    started = dolmen("train", "ppo", "--init", "model", "--help").out
    assert (
        "[0.003]" in alone and "[1e-06]" in started and "[python-standard-library]" not in started
    )


def test_choices_and_defaults_of_a_model_are_shown():
    shown = " ".join(
        dolmen("train", "pretrain", "--model.model-type=gemma2", "--help", "--all").out.split()
    )
    assert "--model.hidden-activation {silu, swish, gelu, gelu_python, relu, gelu_new," in shown
    assert "--model.rope-parameters.rope-type {default, linear, llama3, yarn, dynamic," in shown
    assert "--model.layer-types [{full_attention, sliding_attention} ...]|None" in shown
    assert "is sliding_attention. (default: sliding_attention full_attention sliding" in shown


def test_usage_and_version():
    for words in ((), ("--help",), ("-h",), ("help",)):
        shown = dolmen(*words)
        assert shown.code == (0 if words else 2) and all(
            f"  {verb} " in shown.out for verb in VERBS
        )
    for words in (["--version"], ["-V"], ["version"]):
        assert dolmen(*words).out == f"dolmen {package.__version__}\n"
    wrong = dolmen("trian")
    assert (
        wrong.code == 2
        and "no verb 'trian'" in wrong.err
        and "  train " in wrong.err
        and not wrong.out
    )


def test_recipes_lists_every_recipe():
    shown = dolmen("recipes")
    assert shown.code == 0 and all(name in shown.out for name in RECIPES)
    assert "8.03 B" in shown.out and "70.6 B" in shown.out and "175 B" in shown.out
    assert dolmen("recipes", "--help").code == 0 and dolmen("recipes", "more").code == 2


def test_options_win_over_the_file_and_the_file_over_defaults(material):
    request = parse_run(
        "train",
        [
            str(material.file),
            "--optimizer.lr",
            "0.5",
            "--layout.tp=2",
            "--layout.sequence-parallel",
            "--data.path",
            "a",
            "0.5:b",
            "--train.steps",
            "None",
            "--model.rope.theta",
            "500.0",
            "--model.no_tie_word_embeddings",
            "--out",
            "x",
        ],
    )
    config = request.config
    assert (
        config.optimizer.lr == 0.5
        and config.optimizer.warmup_steps == 2
        and config.optimizer.clip == 1.0
    )
    assert config.layout.tp == 2 and config.layout.sequence_parallel and config.layout.dp is None
    assert config.data.path == ("a", "0.5:b") and config.data.tokenizer == str(material.tokenizer)
    assert config.train.steps is None and config.train.global_batch_size == 4
    assert config.model.config == tinyrun.CONFIG | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}
    }
    assert config.name == "tiny"
    handling = request.handling
    assert handling.out == "x" and not handling.resume and handling.nproc is None


@pytest.mark.parametrize("word", ["None", "null"])
def test_a_word_unsets_any_option_that_may_be_unset(material, tmp_path, word):
    values = yaml.safe_load(material.file.read_text())
    values |= {"finish": {"export": True, "sample": "Once"}}
    values["data"]["validation"] = "text"
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    words = f"--finish.sample {word} --data.validation={word} --train.steps {word} --data.path"
    config = parse_run("train", [str(file), *words.split(), word, "--train.epochs", "1"]).config
    assert config.finish.sample is config.data.validation is config.train.steps is None
    assert config.data.path == (word,)  # must be there, so this is a name


def test_init_decides_the_model(material, tmp_path):
    config = parse_run("train", ["quickstart", "--init", str(material.model)]).config
    read = json.loads((material.model / "config.json").read_text())
    assert config.model.config == read and config.init == str(material.model)
    config = parse_run(
        "train", ["pretrain", f"--init={material.model}", "--model.dropout", "0.1"]
    ).config
    assert config.train.dropout == 0.1 and config.model.config == read
    config = parse_run(
        "train", ["pretrain", f"--init={material.model}", "--model.rope-theta", "5"]
    ).config
    assert config.model.spec.blocks[0].mixer.positions.theta == 5
    assert {n for n in read if read[n] != config.model.config[n]} == {"rope_parameters"}
    assert parse_run("train", ["pretrain"]).config.model is None
    (tmp_path / "init.yaml").write_text(yaml.safe_dump({"init": str(material.model)}))
    config = parse_run("train", [str(tmp_path / "init.yaml")]).config
    assert config.model.config == read and config.name == "init"


@pytest.mark.parametrize(
    "gpus, fast, dp, dtype", [(0, False, 2, "float32"), (1, True, 1, "bfloat16")]
)
def test_quickstart_is_fitted_to_the_machine(monkeypatch, gpus, fast, dp, dtype):
    """When it is trained: its help shows what it is on any."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: fast)
    run = parse_run("train", ["quickstart"]).config
    assert (run.layout.dp, run.train.dtype) == (dp, dtype)
    # another number of processes has been chosen
    assert parse_run("train", ["quickstart", "--nproc", "4"]).config.layout.dp is None
    with monkeypatch.context() as patch:
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")):
            patch.setenv(name, value)
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", "29500")
        assert parse_run("train", ["quickstart"]).config.layout.dp is None
    shown = dolmen("train", "quickstart", "--help").out
    assert re.search(r"--train.dtype .*\[float32\]", shown)


@pytest.mark.parametrize("words", [[name] for name in RECIPES] + [["pretrain", "--out", "a b"]])
def test_a_worker_takes_the_run_that_its_launcher_has(words, tmp_path):
    """To the last bit of every number; it parses no words."""
    request = parse_run(
        "train", [*words, "--optimizer.lr", "0.1234567890123456789", "--train.seed", "7"]
    )
    file = launcher._write(tmp_path / "handed.yaml", to_dict(request))
    assert read_handed("train", Path(file)) == request


@pytest.mark.parametrize(
    "verb, words",
    [
        ("verify", "model --against other --length 3 --layout.tp 2"),
        ("generate", "model --prompt=--x --prompt 1e-3 --prompt null --temperature 1e-7 --top-k 3"),
        ("evaluate", "model --data.path a b --stride 3 --dtype bfloat16 --layout.pp 2"),
    ],
)
def test_a_worker_takes_the_options_that_its_launcher_has(verb, words, tmp_path):
    options = read(verb, [*words.split(), "--device", "cpu"])
    assert (
        read_handed(verb, Path(launcher._write(tmp_path / "handed.yaml", to_dict(options))))
        == options
    )


def test_a_model_is_made_of_options():
    """Of a family and its defaults, every field of the config.json stated; by any of the names."""
    words = "pretrain --model.model-type gpt2 --model.hidden-size 64 --model.n-head=4".split()
    model = parse_run("train", words).config.model
    content = model.config
    assert (content["n_embd"], content["n_head"], content["n_layer"]) == (64, 4, 12)
    assert content["n_inner"] == 256 and content["architectures"] == ["GPT2LMHeadModel"]
    assert content["resid_pdrop"] == 0.0 and content["dtype"] == "float32"
    assert (
        parse_run("train", ["pretrain", "--model.model-type", "llama"]).config.model.spec.layers
        == 32
    )
    words = "pretrain --model.num-key-value-heads 4 --model.hidden_size 512".split()
    model = parse_run("train", words).config.model
    assert model.model_type == "llama" and model.spec.blocks[0].mixer.kv_heads == 4
    words = "qwen3-30b-a3b --model.dense-layers 0 2 --model.num-experts 16".split()
    content = parse_run("train", words).config.model.config
    assert content["mlp_only_layers"] == [0, 2] and content["num_local_experts"] == 16


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--model.n-embd 96 --model.hidden-size 192",
            r"model.n_embd \(96\) and model.hidden_size \(192\) are two names of one option",
        ),
        ("--model.n_embd=96 --model.hidden-size 192", r"model.n_embd \(96\) and model.hidden_size"),
        (
            "--model.dropout 0.1 --train.dropout 0.2",
            r"model.dropout \(0.1\) and train.dropout \(0.2\) are two names",
        ),
    ],
)
def test_two_names_of_one_option_that_disagree(words, said):
    """Equal values may be given twice, and of one name the last counts."""
    argv = ["pretrain", "--model.model-type", "gpt2"]
    with pytest.raises(BadInput, match=said):
        read("train", [*argv, *words.split()])
    same = "--model.n-embd 96 --model.hidden-size=96".split()
    assert parse_run("train", [*argv, *same]).config.model.spec.hidden_size == 96
    eps = "--model.norm-eps 1e-3 --model.layer-norm-epsilon 0.001".split()
    assert parse_run("train", [*argv, *eps]).config.model.spec.final_norm.eps == 1e-3
    last = "--model.n-embd 96 --model.n-embd 192".split()
    assert parse_run("train", [*argv, *last]).config.model.spec.hidden_size == 192


def test_a_model_of_another_family():
    """The same spec where the family has it; else what both have by name."""
    quickstart = RECIPES["quickstart"]().model
    moved = parse_run("train", ["quickstart", "--model.model-type", "mistral"]).config.model
    assert moved.model_type == "mistral" and moved.spec == quickstart.spec
    words = "quickstart --model.model-type mixtral --model.num-local-experts 4".split()
    model = parse_run("train", words).config.model
    mlp = model.spec.blocks[0].mlp
    assert (mlp.number, mlp.per_token, mlp.size) == (4, 2, 704) and model.spec.hidden_size == 256
    words = "mixtral-8x7b --model.model-type llama".split()
    assert parse_run("train", words).config.model.spec.blocks[0].mixer.positions.theta == 1e6
    gpt2 = parse_run("train", ["quickstart", "--model.model-type=gpt2"]).config.model.spec
    assert (gpt2.hidden_size, gpt2.layers, gpt2.blocks[0].mlp.size) == (256, 4, 704)
    bert = parse_run("train", ["llama-8b", "--model.model-type=bert"]).config.model.spec
    assert bert.hidden_size == 4096 and bert.head.tied  # Llama's is not, which BERT cannot express


def test_a_file_is_named_after_itself_or_its_run(tmp_path):
    for name, want in (("mine.yaml", "mine"), ("config.yaml", tmp_path.name)):
        (tmp_path / name).write_text("train: {steps: 3}\n")
        assert parse_run("train", [str(tmp_path / name)]).config.name == want


def test_an_empty_file_is_the_defaults(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    config = parse_run("train", [str(tmp_path / "empty.yaml")]).config
    assert config.model is None and config.optimizer.lr == 3e-4


def test_a_name_like_a_recipe():
    with pytest.raises(BadInput, match="did you mean quickstart"):
        read("train", ["quikstart"])
    with pytest.raises(BadInput, match="recipes are quickstart, pretrain"):
        read("train", ["zzz"])
    with pytest.raises(
        BadInput, match=r"^z{77}\.\.\. \(5,000 characters\) is neither a recipe nor a"
    ):
        read("train", ["z" * 5000])
