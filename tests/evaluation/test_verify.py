"""A right model passes and a spoiled one fails: gates and ups, keys and values exchanged, a norm
changed.
"""

import math
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
import transformers
from references import MODELS, VOCABULARY, save, spoiled

from dolmen.conversion import hf
from dolmen.conversion.source import open_source
from dolmen.core import mesh as meshes
from dolmen.core.log import console
from dolmen.data.config import TextConfig
from dolmen.evaluation import perplexity
from dolmen.evaluation.reference_model import fp32_products, quiet_transformers
from dolmen.evaluation.verify import Reference, VerifyRow, _tokens, greedy_row, verify

ROWS = ["logits", "loss", "gradient norm", "gradients", "greedy tokens"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: save(name, root / name) for name in MODELS}


def scale(name, factor):
    def change(weights):
        weights[name] *= factor

    return change


def exchange(a, b):
    def change(weights):
        weights[a], weights[b] = weights[b], weights[a]

    return change


def exchange_gpt2_keys_and_values(weights):
    w = weights["transformer.h.1.attn.c_attn.weight"]
    weights["transformer.h.1.attn.c_attn.weight"] = torch.cat(
        (w[:, :32], w[:, 64:], w[:, 32:64]), 1
    )


LAYER = "model.layers.1."
SPOILED = {
    "llama gate and up": (
        "llama",
        exchange(LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight"),
        {},
    ),
    "llama k and v": (
        "llama",
        exchange(LAYER + "self_attn.k_proj.weight", LAYER + "self_attn.v_proj.weight"),
        {},
    ),
    "qwen3 k and v": (
        "qwen3",
        exchange(LAYER + "self_attn.k_proj.weight", LAYER + "self_attn.v_proj.weight"),
        {},
    ),
    "gpt2 k and v": ("gpt2", exchange_gpt2_keys_and_values, {}),
    "mixtral gate and up": (
        "mixtral",
        exchange(
            LAYER + "block_sparse_moe.experts.2.w1.weight",
            LAYER + "block_sparse_moe.experts.2.w3.weight",
        ),
        {},
    ),
    "mixtral experts": (
        "mixtral",
        exchange(
            LAYER + "block_sparse_moe.experts.1.w2.weight",
            LAYER + "block_sparse_moe.experts.2.w2.weight",
        ),
        {},
    ),
    "qwen3-moe router": ("qwen3-moe", scale(LAYER + "mlp.gate.weight", 1.01), {}),
    "qwen3-moe weights of experts": ("qwen3-moe", None, dict(norm_topk_prob=True)),
    "llama norm": ("llama", scale(LAYER + "input_layernorm.weight", 1.01), {}),
    "qwen3 q norm": ("qwen3", scale(LAYER + "self_attn.q_norm.weight", 1.01), {}),
    "gpt2 norm": ("gpt2", scale("transformer.ln_f.weight", 1.001), {}),
    "llama eps": ("llama", None, dict(rms_norm_eps=1e-4)),
    "qwen3 eps": ("qwen3", None, dict(rms_norm_eps=1e-4)),
    "gpt2 eps": ("gpt2", None, dict(layer_norm_epsilon=1e-3)),
    "llama rope": (
        "llama",
        None,
        dict(rope_parameters=dict(rope_type="default", rope_theta=9000.0)),
    ),
    "llama nan": ("llama", scale("model.norm.weight", math.nan), {}),
}


def test_an_auxiliary_loss_of_transformers_is_left_out(folders, tmp_path):
    assert verify(
        open_source(spoiled(folders["mixtral"], tmp_path / "logits", output_router_logits=True))
    ).ok


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_transformers(folders, name, capsys):
    report = verify(open_source(folders[name]))
    assert report.ok and [row.name for row in report.rows] == ROWS and not report.notes, report
    # tolerances are for deep models
    assert all(row.difference < row.tolerance / 10 for row in report.rows[:4])
    console().print(report.table())
    shown = capsys.readouterr().out
    assert all(row in shown for row in ROWS) and "DIFFERS" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_model_does_not(folders, tmp_path, case):
    name, change, config = SPOILED[case]
    report = verify(
        open_source(spoiled(folders[name], tmp_path / "spoiled", change, **config)),
        open_source(folders[name]),
    )
    failed = [row.name for row in report.rows if not row.ok]
    assert not report.ok and "logits" in failed, report
    assert len(report.notes) == len(config)  # a structure that differs is named


@pytest.mark.parametrize("bars", [True, False])
def test_settings_of_torch_and_transformers_are_restored(bars):
    logging = transformers.logging
    known = torch.get_float32_matmul_precision(), logging.get_verbosity()
    shown = logging.is_progress_bar_enabled()

    def settings():
        bars = logging.is_progress_bar_enabled()
        return torch.get_float32_matmul_precision(), logging.get_verbosity(), bars

    def choose(precision, level, bars):
        torch.set_float32_matmul_precision(precision)
        logging.set_verbosity(level)
        logging.enable_progress_bar() if bars else logging.disable_progress_bar()

    choose("high", logging.INFO, bars)
    try:
        with suppress(KeyError), fp32_products(), quiet_transformers():
            assert settings() == ("highest", logging.ERROR, False)
            raise KeyError("after an error too")
        assert settings() == ("high", logging.INFO, bars)
    finally:
        choose(*known, shown)


@pytest.mark.parametrize("padding", (0, 7, VOCABULARY - 1, -1))
def test_the_padding_token_is_not_drawn(folders, tmp_path, padding):
    """transformers gives its row of the embedding no gradient: drawn, it would be a difference."""
    folder = spoiled(folders["llama"], tmp_path / "padded", pad_token_id=padding)
    report = verify(open_source(folder))
    assert report.ok and all(row.difference < row.tolerance / 10 for row in report.rows[:4]), report
    config = hf.read_config(folder)
    sampled = set(_tokens(config.spec, 64, torch.device("cpu"), padding).windows.flatten().tolist())
    missing = set(range(VOCABULARY)) - sampled  # chance leaves out some of 61 in 192 draws
    assert padding % VOCABULARY in missing and len(missing) < 8 and max(sampled) < VOCABULARY


def test_without_gradients(folders):
    report = verify(open_source(folders["gpt2"]), length=8, gradients=False)
    assert report.ok and [row.name for row in report.rows] == ["logits", "loss", "greedy tokens"]


def test_what_fills_in_tokens(tmp_path, capsys):
    """Labels in their own places, and no texts; of pairs the gradients of both losses."""
    sizes = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    for follows in (False, True):
        torch.manual_seed(0)
        config = transformers.BertConfig(**sizes, intermediate_size=40, max_position_embeddings=32)
        made = transformers.BertForPreTraining if follows else transformers.BertForMaskedLM
        made(config).save_pretrained(tmp_path / str(follows))
        capsys.readouterr()
        report = verify(open_source(tmp_path / str(follows)), length=20)
        assert report.ok and [row.name for row in report.rows] == ROWS[:4]
        with pytest.raises(ValueError, match="bidirectional encoder.*use dolmen verify"):
            perplexity.open_text(open_source(tmp_path / str(follows)), TextConfig())


def test_not_a_number_is_a_difference_even_if_both_say_it(folders, tmp_path):
    folder = spoiled(folders["llama"], tmp_path / "nan", scale("model.norm.weight", math.nan))
    assert not any(row.ok for row in verify(open_source(folder)).rows)
    assert (
        not VerifyRow("", math.nan, 1.0).ok
        and not VerifyRow("", 0.0, math.nan).ok
        and not VerifyRow("", -2.0, 1.0).ok
    )


def test_models_of_different_shapes_are_refused(folders, tmp_path):
    with pytest.raises(
        ValueError, match="different shapes .*num_key_value_heads is 2 in llama, 1 in qwen3"
    ):
        verify(open_source(folders["llama"]), open_source(folders["qwen3"]))

    def cut(weights):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][:50]

    small = spoiled(folders["llama"], tmp_path / "small", cut, vocab_size=50)
    with pytest.raises(ValueError, match=f"vocab_size is 50 in small, {VOCABULARY} in llama"):
        verify(open_source(small), open_source(folders["llama"]))


def test_a_window_that_is_not_reached_is_noted(tmp_path, monkeypatch):
    monkeypatch.setitem(
        MODELS, "mistral", ("mistral", MODELS["llama"][1] | dict(sliding_window=20))
    )
    folder = save("mistral", tmp_path / "mistral")
    assert (
        "sliding window of 20, so the window is not tested: use a larger --length"
        in verify(open_source(folder), length=16).notes[0]
    )
    report = verify(open_source(folder))
    assert report.ok and not report.notes


def test_a_tie_is_no_difference():
    """Texts may part where both tokens are as likely; a text that parts elsewhere is wrong."""
    logits = torch.tensor([[[0.0, 3.0, 3.0001], [5.0, 1.0, 0.0]]])
    theirs = Reference(logits, 0.0, None, logits.argmax(-1), logits)
    assert theirs.new_tokens.tolist() == [[2, 0]]
    note = "1 sequences of 2 tokens; smallest logit margin 0.0001"
    assert greedy_row([[2, 0]], theirs, 1e-4) == VerifyRow("greedy tokens", 0, 0, note)
    assert greedy_row([[1, 1]], theirs, 1e-4) == VerifyRow(
        "greedy tokens", 0, 0, note + "; 1 differ at a tie"
    )
    assert not greedy_row([[1, 0]], theirs, 1e-5).ok and not greedy_row([[2, 1]], theirs, 1e-4).ok


def two_ranks(folders, wrong):
    mesh = meshes.build_mesh(1, 2, torch.device("cpu"))
    reports = {name: verify(open_source(folder), mesh=mesh) for name, folder in folders.items()}
    reports["wrong"] = verify(open_source(wrong), open_source(folders["llama"]), mesh=mesh)
    numbers = {
        name: [(row.name, row.difference, row.tolerance) for row in r.rows]
        for name, r in reports.items()
    }
    everyone = [None, None]
    dist.all_gather_object(everyone, numbers)
    assert everyone[0] == everyone[1], "ranks disagree"
    return reports


def test_two_ranks_agree_with_transformers_and_each_other(folders, tmp_path, spawn):
    wrong = spoiled(folders["llama"], tmp_path / "wrong", *SPOILED["llama norm"][1:2])
    reports = spawn(2)(two_ranks, folders, wrong)
    assert not reports.pop("wrong").ok
    assert all(report.ok for report in reports.values()), reports
