"""The command line as a user meets it: verbs, help, option names (frozen), and what wins
over what.
"""

import re

import pytest
import tinyrun
import yaml
from tinyrun import dolmen

import dolmen as package
from dolmen.cli import VERBS
from dolmen.cli.errors import BadInput
from dolmen.cli.options import parse_train
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
    data.path data.tokenizer data.validation data.validation-fraction data.end-of-text
    data.document-mask data.no-document-mask data.text-field data.cache data.workers
    optimizer.lr optimizer.warmup-steps optimizer.schedule optimizer.min-lr optimizer.decay-fraction
    optimizer.weight-decay optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.clip
    train.steps train.seed train.dtype train.sequence-length train.global-batch-size
    train.microbatch-size train.compile train.no-compile train.spike train.spike-factor
    train.max-skipped-steps train.hang-seconds
    checkpoint.every checkpoint.keep
    log.every log.validate-every log.validation-tokens
    finish.export finish.no-export finish.verify finish.no-verify finish.sample finish.compressors
    finish.no-compressors
""".split()
OTHERS = {
    "export": "help to dtype",
    "verify": "help against length layout.tp",
    "generate": "help prompt max-new-tokens temperature top-k top-p seed layout.tp",
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


@pytest.mark.parametrize("verb", OTHERS)
def test_options_of_other_verbs_are_frozen(verb):
    shown = dolmen(verb, "--help")
    assert shown.code == 0 and options(shown.out) == OTHERS[verb].split()


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
