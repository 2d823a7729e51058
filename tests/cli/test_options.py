"""The command line as a user meets it: verbs, help, option names (frozen), and what wins
over what.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tinyrun
import yaml
from tinyrun import dolmen

import dolmen as package
from dolmen.cli import VERBS
from dolmen.cli.errors import BadInput
from dolmen.cli.options import VERBS as VERB_OPTIONS
from dolmen.cli.options import TrainOptions, parse_train, read
from dolmen.cli.parse import names
from dolmen.cli.spellings import EQUAL, HOW, suggestion
from dolmen.convert import hf
from dolmen.recipes import RECIPES

material, one_thread = tinyrun.material, tinyrun.one_thread

# What people type and write in scripts. To add one is free; to rename or remove one breaks
# somebody.
TRAIN = """
    help init out resume overwrite nproc max-restarts
    model.family model.vocab-size model.hidden-size model.intermediate-size model.num-hidden-layers
    model.num-attention-heads model.num-key-value-heads model.head-dim model.max-position-embeddings
    model.position model.norm model.norm-eps model.qk-norm model.no-qk-norm model.mlp
    model.activation model.num-experts model.num-experts-per-tok model.moe-intermediate-size
    model.norm-topk-prob model.no-norm-topk-prob model.dense-layers model.router-balance
    model.router-aux-loss-coef model.router-z-loss-coef model.router-bias-rate model.attention-bias
    model.no-attention-bias model.output-bias model.no-output-bias model.mlp-bias model.no-mlp-bias
    model.sliding-window model.sliding-layers model.tie-word-embeddings model.no-tie-word-embeddings
    model.dropout model.initializer-range
    model.rope.theta model.rope.scaling model.rope.factor model.rope.low-freq-factor
    model.rope.high-freq-factor model.rope.original-max-position-embeddings
    layout.tp layout.cp layout.pp layout.dp layout.ep layout.zero layout.sequence-parallel
    layout.no-sequence-parallel layout.context layout.schedule layout.virtual-stages
    layout.recompute layout.recompute-layers
    data.path data.tokenizer data.end-of-text data.document-mask data.no-document-mask
    data.text-field data.cache data.workers data.validation data.validation-fraction
    optimizer.lr optimizer.warmup-steps optimizer.schedule optimizer.min-lr optimizer.decay-fraction
    optimizer.weight-decay optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.clip train.steps
    train.seed train.dtype train.sequence-length train.global-batch-size train.microbatch-size
    train.device train.compile train.no-compile train.deterministic train.no-deterministic
    train.spike train.spike-factor train.max-skipped-steps train.hang-seconds
    checkpoint.every checkpoint.keep
    log.every log.validate-every log.profile log.validation-tokens
    finish.export finish.no-export finish.verify finish.no-verify finish.sample finish.compressors
    finish.no-compressors
""".split()
OTHERS = {
    "export": "help to dtype",
    "verify": "help against length device layout.tp",
    "generate": "help prompt max-new-tokens temperature top-k top-p seed dtype device layout.tp",
    "evaluate": (
        "help sequence-length dtype device data.path data.tokenizer data.end-of-text "
        "data.document-mask data.no-document-mask data.text-field data.cache data.workers layout.tp"
    ),
    "schedule": "help pp microbatches virtual-stages out list forward backward input weight send",
}


def options(text: str) -> list[str]:
    """Names of the options of a help text, in its order; their lines begin with a dash, those of
    their texts are indented.
    """
    return re.findall(
        r"--([a-z][a-z0-9.-]*)",
        "\n".join(line for line in text.splitlines() if re.match(r"  -", line)),
    )


def test_options_of_train_are_frozen():
    shown = dolmen("train", "--help")
    assert shown.code == 0 and options(shown.out) == TRAIN
    assert sorted(names(TrainOptions)) == sorted(TRAIN)  # what suggestions are made of


@pytest.mark.parametrize("verb", OTHERS)
def test_options_of_other_verbs_are_frozen(verb):
    shown = dolmen(verb, "--help")
    assert shown.code == 0 and options(shown.out) == OTHERS[verb].split()
    assert sorted(names(VERB_OPTIONS[verb])) == sorted(OTHERS[verb].split())


def test_help_imports_neither_torch_nor_transformers():
    """Whoever asks what can be said does not wait seconds for what computes it; nor does a mistyped
    option.
    """
    code = """
import sys
from dolmen.cli import VERBS, main
asked = [*([verb, "--help"] for verb in VERBS), ["train", "llama-8b", "--help"],
         ["train", "llama-8b", "--train.step", "5"], ["train", "llama-9b"], ["export"]]
for words in asked:
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    heavy = {"torch", "transformers", "datasets", "tokenizers", "matplotlib", "numpy"}
    assert code == (0 if "--help" in words else 2), (words, code)
    assert not heavy & set(sys.modules), (words, heavy & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


OPTION_NAMES = {*TRAIN, *" ".join(OTHERS.values()).split()}


@pytest.mark.parametrize("spelling", EQUAL)
def test_other_spellings_lead_to_our_options(spelling):
    """Every option that a suggestion names exists, and each suggestion is made by a verb that has
    it; none is for a name that we have ourselves.
    """
    targets = [EQUAL[spelling]] if isinstance(EQUAL[spelling], str) else EQUAL[spelling]
    assert {target.split()[0] for target in targets} <= OPTION_NAMES
    assert spelling not in OPTION_NAMES
    told = [suggestion(spelling, names(cls)) for cls in (TrainOptions, *VERB_OPTIONS.values())]
    assert f"did you mean --{targets[0]}?" in told, told


@pytest.mark.parametrize("spelling", HOW)
def test_advice_names_options_that_exist(spelling):
    text = HOW[spelling]
    named = re.findall(r"--([a-z][a-z0-9.-]*[a-z0-9])", text)
    assert set(named) <= set(TRAIN) and suggestion(spelling, TRAIN) == text
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
        ("train quickstart --max-steps 2", "did you mean --train.steps?"),
        ("train quickstart --tensor-parallel-size 2", "did you mean --layout.tp?"),
        ("train quickstart --training.seq-len 2", "did you mean --train.sequence-length?"),
        ("train quickstart --bf16", "did you mean --train.dtype bfloat16?"),
        ("train quickstart --every 2", "did you mean --checkpoint.every or --log.every?"),
        ("train quickstart --optimiser.lr 2", "did you mean --optimizer.lr?"),
        ("train quickstart --train.stesp 2", "did you mean --train.steps?"),
        ("train quickstart --qqqq 2", "unknown option --qqqq: dolmen train --help lists them"),
        (
            "train quickstart --gradient-accumulation-steps 4",
            "gradients accumulate over train.global-batch-size / (layout.dp x "
            "train.microbatch-size) microbatches: set --train.global-batch-size",
        ),
        ("generate model --promt a", "unknown option --promt: did you mean --prompt?"),
        ("generate model --prompt a --max_tokens 3", "did you mean --max-new-tokens?"),
        ("verify model --tensor-parallel-size 2", "did you mean --layout.tp?"),
        ("export run --output x", "did you mean --to?"),
        ("schedule 1f1b --num-microbatches 2", "did you mean --microbatches?"),
        ("recipes more", "more is no option: dolmen recipes --help lists them"),
        ("recipes --all", "unknown option --all: dolmen recipes --help lists them"),
    ],
)
def test_an_unknown_option_is_told_with_the_one_that_is_meant(words, said):
    shown = dolmen(*words.split())
    assert shown.code == 2 and said in shown.err and not shown.out
    assert shown.err.startswith(f"dolmen {words.split()[0]}: ") and shown.err.count("\n") == 1


README = (Path(__file__).parents[2] / "README.md").read_text()
COMMANDS = re.findall(r"^ +dolmen (.*?)(?: +#.*)?$", README, re.MULTILINE)


def test_the_readme_shows_every_verb():
    assert {command.split()[0] for command in COMMANDS} == set(VERBS)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_readme_parse(command, tmp_path, monkeypatch):
    """As they stand there, but for files and models that a reader would have."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "pretrain").mkdir(parents=True)
    (tmp_path / "runs" / "pretrain" / "config.yaml").write_text("name: pretrain\n")
    monkeypatch.setattr(hf, "resolve", Path)
    monkeypatch.setattr(hf, "read_config", lambda folder: RECIPES["llama-8b"]().model)
    verb, *words = shlex.split(command)
    read(verb, words)


def test_options_that_the_readme_names_exist():
    named = set(re.findall(r"`(--[a-z][a-z0-9.-]*)", README))
    assert len(named) > 10 and {name.removeprefix("--") for name in named} <= OPTION_NAMES


def test_every_option_is_explained():
    """A docstring is the help: an option without one shows its default and nothing else."""
    shown = dolmen("train", "quickstart", "--help").out
    for entry in re.split(r"\n  (?=--[a-z])", shown)[1:]:
        text = " ".join(entry.split("\n\n")[0].split("\n", 1)[1].split())
        assert len(re.sub(r"\(default: .*?\)", "", text).split()) > 1, entry
    assert "(default: 0.003)" in shown and "bpe:4096" in shown  # the recipe's own defaults


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
    config, given = parse_train(
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
            "--model.qk-norm",
            "--out",
            "x",
        ]
    )
    assert (
        config.optimizer.lr == 0.5
        and config.optimizer.warmup_steps == 2
        and config.optimizer.clip == 1.0
    )
    assert config.layout.tp == 2 and config.layout.sequence_parallel and config.layout.dp is None
    assert config.data.path == ("a", "0.5:b") and config.data.tokenizer == str(material.tokenizer)
    assert config.train.steps is None and config.train.global_batch_size == 4
    assert config.model.qk_norm and config.model.vocab_size == 300 and config.name == "tiny"
    assert given.out == "x" and not given.resume and given.nproc is None


def test_init_decides_the_model(material, tmp_path):
    config, _ = parse_train(["quickstart", "--init", str(material.model)])
    assert (
        config.model.hidden_size == 32
        and config.init == str(material.model)
        and config.model.hf["model_type"] == "llama"
    )
    config, _ = parse_train(["pretrain", f"--init={material.model}", "--model.dropout", "0.1"])
    assert config.model.dropout == 0.1 and config.model.vocab_size == 300
    assert parse_train(["pretrain"])[0].model is None
    (tmp_path / "init.yaml").write_text(yaml.safe_dump({"init": str(material.model)}))
    config, _ = parse_train([str(tmp_path / "init.yaml")])
    assert config.model.hidden_size == 32 and config.name == "init"


def test_a_file_is_named_after_itself_or_its_run(tmp_path):
    for name, want in (("mine.yaml", "mine"), ("config.yaml", tmp_path.name)):
        (tmp_path / name).write_text("train: {steps: 3}\n")
        assert parse_train([str(tmp_path / name)])[0].name == want


def test_an_empty_file_is_the_defaults(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    config, _ = parse_train([str(tmp_path / "empty.yaml")])
    assert config.model is None and config.optimizer.lr == 3e-4


def test_a_name_like_a_recipe():
    with pytest.raises(BadInput, match="did you mean quickstart"):
        parse_train(["quikstart"])
    with pytest.raises(BadInput, match="recipes are quickstart, pretrain"):
        parse_train(["zzz"])
