"""Models with rows for more tokens: beside `transformers`, the old rows, and arithmetic."""

import contextlib
import io
import json
import math
import shutil

import pytest
import torch
import transformers
from texts import CHINESE, ENGLISH

from dolmen.conversion.source import open_source
from dolmen.data.tokenizer import load_tokenizer
from dolmen.vocabulary.config import (
    VocabExtendConfig,
    VocabMergeConfig,
    VocabText,
    VocabTrainConfig,
)
from dolmen.vocabulary.extend import extend
from dolmen.vocabulary.merge import merge
from dolmen.vocabulary.tokenizer_folder import open_vocabulary, transformers_tokenizer
from dolmen.vocabulary.train import train

SIZE = 460  # tokens of the old tokenizer
CONFIGS = {  # of transformers: tied, a head of its own, a head with a bias
    "llama": dict(
        model_type="llama",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    ),
    "gpt2": dict(model_type="gpt2", n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "gptj": dict(model_type="gptj", n_embd=16, n_layer=2, n_head=2, n_positions=64, rotary_dim=4),
}


@pytest.fixture(scope="module")
def tokenizers(vocabularies, tmp_path_factory):
    """kind -> (a tokenizer of English that knows single characters of Chinese, one that has words
    of it too).
    """
    folder, made = tmp_path_factory.mktemp("tokenizers"), {}
    both = folder / "both.txt"
    both.write_text(ENGLISH + "天\n气\n" * 40, encoding="utf-8")

    def get(kind):
        if kind not in made:
            old, new = folder / f"old-{kind}", folder / f"merged-{kind}"
            train(VocabTrainConfig(SIZE, kind, str(old), VocabText((str(both),))), progress=False)
            config = VocabMergeConfig(str(old), str(vocabularies("zh", kind)), str(new))
            merge(config, progress=False)
            made[kind] = old, new
        return made[kind]

    return get


def model_of(folder, name, rows, tokenizer, **more):
    """A random model of transformers with so many rows, in a folder with its tokenizer."""
    config = {**CONFIGS[name], "vocab_size": rows, **more}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config)
    ).eval()
    for p in model.parameters():  # biases too are no zeros
        torch.nn.init.normal_(p, std=0.3)
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)
    return model


CASES = [
    ("llama", "bpe", 0, {"tie_word_embeddings": False}),
    ("llama", "byte-bpe", 37, {"tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 1}),
    ("llama", "unigram", 4000, {"tie_word_embeddings": True}),
    ("gpt2", "byte-bpe", 1, {}),
    ("gptj", "bpe", 3, {"tie_word_embeddings": False}),
]


@pytest.mark.parametrize("name,kind,padding,more", CASES)
def test_an_extended_model_is_the_same_of_old_tokens(
    tokenizers, tmp_path, name, kind, padding, more
):
    """In transformers, to the bit; new rows are means of rows of pieces, new ids fill padding."""
    old, merged = tokenizers(kind)
    before = model_of(tmp_path / "model", name, SIZE + padding, old, **more)
    to = tmp_path / "to"
    done = extend(VocabExtendConfig(str(tmp_path / "model"), str(merged), str(to)), progress=False)
    after = transformers.AutoModelForCausalLM.from_pretrained(to).eval()
    made = transformers.AutoTokenizer.from_pretrained(to)
    size = len(made)
    assert (done.old, done.tokens) == (SIZE, size)
    assert after.config.vocab_size == done.rows == max(SIZE + padding, size)
    reported = before.config.to_dict() | {"vocab_size": done.rows}
    found = after.config.to_dict()
    for field in ("_name_or_path", "architectures", "transformers_version", "dtype"):
        reported.pop(field, None)
        found.pop(field, None)
    assert found == reported, "and nothing else of config.json"
    ids = torch.randint(SIZE, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other = before(ids).logits[..., :SIZE], after(ids).logits[..., :SIZE]
    # products of another width may be added in another order
    assert torch.equal(one, other) or (one - other).abs().max() < 1e-6 * one.abs().max()
    tables = {
        "embedding": (before.get_input_embeddings().weight, after.get_input_embeddings().weight),
        "head": (before.get_output_embeddings().weight, after.get_output_embeddings().weight),
    }
    if name == "gptj":
        tables["bias"] = (before.lm_head.bias, after.lm_head.bias)
    pieces = transformers_tokenizer(open_vocabulary(str(old), ""), "").backend_tokenizer.model
    vocab = made.get_vocab()
    for was, now in tables.values():
        assert torch.equal(was[:SIZE], now[:SIZE])
        for token, number in vocab.items():
            if number >= SIZE:
                rows = [one.id for one in pieces.tokenize(token)]
                assert torch.allclose(now[number], was[rows].mean(0), atol=1e-7), token
        assert torch.equal(now[size:], was[size:]), "what is still padding"
    both = [vocab[token] for token in (written(kind, "天"), written(kind, "气"))]
    weather = written(kind, "天气")
    if kind != "unigram":  # where it is no piece
        assert max(both) < SIZE <= vocab[weather]
    if weather in vocab:
        was, now = tables["embedding"]
        assert torch.allclose(now[vocab[weather]], was[both].mean(0), atol=1e-7)


def written(kind, text):
    """A token as its vocabulary has it."""
    if kind != "byte-bpe":
        return text
    (pair,) = load_bytes().pre_tokenize_str(text)
    return pair[0]


def load_bytes():
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@pytest.mark.parametrize("init", ["random", "zero"])
def test_other_rows_are_random_or_zero(tokenizers, tmp_path, init):
    old, merged = tokenizers("bpe")
    before = model_of(tmp_path / "model", "llama", SIZE, old, tie_word_embeddings=False)
    for number, seed in enumerate((0, 0, 1)):
        to = tmp_path / f"to{number}"
        config = VocabExtendConfig(str(tmp_path / "model"), str(merged), str(to), init, seed)
        extend(config, progress=False)
    made = [open_source(tmp_path / f"to{number}") for number in range(3)]
    for name in ("embed.weight", "head.weight"):
        rows = [source.read(name)[SIZE:] for source in made]
        assert torch.equal(rows[0], rows[1])
        if init == "zero":
            assert not rows[0].any()
        else:
            assert not torch.equal(rows[0], rows[2])
            n = rows[0].numel()  # five standard errors of a mean and of a standard deviation
            std = before.config.initializer_range
            assert abs(rows[0].mean()) < 5 * std / n**0.5
            assert abs(rows[0].std() / std - 1) < 5 / (2 * n) ** 0.5


def test_the_report_has_losses_per_byte_before_and_after(tokenizers, tmp_path):
    old, merged = tokenizers("bpe")
    before = model_of(tmp_path / "model", "llama", SIZE, old, tie_word_embeddings=True)
    (tmp_path / "held.txt").write_text(CHINESE[:300], encoding="utf-8")
    text = VocabText((str(tmp_path / "held.txt"),))
    to = tmp_path / "to"
    config = VocabExtendConfig(str(tmp_path / "model"), str(merged), str(to), data=text, window=48)
    done = extend(config, progress=False)
    size = len(CHINESE[:300].encode())
    assert done.before and done.after
    for model, folder, reported in (
        (before, old, done.before),
        (transformers.AutoModelForCausalLM.from_pretrained(to), to, done.after),
    ):
        tokens = load_tokenizer(str(folder))(CHINESE[:300], add_special_tokens=False)["input_ids"]
        assert reported.counts.tokens == len(tokens) and reported.counts.bytes == size
        nats = 0.0
        with torch.no_grad():
            for window in torch.tensor(tokens).split(48):
                logits = model(window[None, :-1]).logits[0]
                nats += torch.nn.functional.cross_entropy(
                    logits, window[1:], reduction="sum"
                ).item()
        assert reported.loss_per_byte == pytest.approx(nats / size, rel=1e-5)
        bits = nats / size / math.log(2)
        assert reported.bits_per_byte == pytest.approx(bits, rel=1e-5)
        assert (
            f"loss {reported.loss_per_byte:.6f} per byte ({reported.bits_per_byte:.6f} bits)"
            in str(reported)
        )
        assert reported.counts.characters == 300
        per_token = (
            f"{300 / len(tokens):.3f} characters and {size / len(tokens):.3f} bytes per token"
        )
        assert per_token in str(reported)
    lines = done.lines()
    assert lines[-2:] == [f"before: {done.before}", f"after:  {done.after}"]
    assert json.loads((to / "extended.json").read_text())["old_tokens"] == SIZE


def test_a_model_in_half_precision_keeps_its_dtype_and_its_generation_config(tokenizers, tmp_path):
    old, merged = tokenizers("byte-bpe")
    before = model_of(tmp_path / "model", "llama", SIZE + 5, old, tie_word_embeddings=True)
    generation = {"eos_token_id": [0, 7], "temperature": 0.5, "do_sample": True}
    with contextlib.redirect_stderr(io.StringIO()):
        before.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    config = VocabExtendConfig(str(tmp_path / "model"), str(merged), str(tmp_path / "to"))
    extend(config, progress=False)
    source = open_source(tmp_path / "to")
    assert {spec.dtype for spec in source.specs.values()} == {torch.bfloat16}
    assert source.generation_config == generation
    (row,) = (
        n
        for t, n in load_tokenizer(str(merged)).get_vocab().items()
        if t == written("byte-bpe", "天气")
    )
    pieces = [load_tokenizer(str(old)).get_vocab()[written("byte-bpe", one)] for one in "天气"]
    table = before.get_input_embeddings().weight[pieces].float().mean(0).to(torch.bfloat16)
    assert torch.equal(source.read("embed.weight")[row], table), "added in fp32"


def test_what_is_no_larger_tokenizer_of_the_model_is_refused(tokenizers, vocabularies, tmp_path):
    old, merged = tokenizers("bpe")
    model_of(tmp_path / "model", "llama", SIZE, old)

    def refused(model, tokenizer):
        config = VocabExtendConfig(str(model), str(tokenizer), str(tmp_path / "to"))
        with pytest.raises(ValueError) as error:
            extend(config, progress=False)
        assert not (tmp_path / "to").exists()
        return str(error.value)

    small = vocabularies("en", "bpe")
    assert "has 450 tokens, not more than that of MODEL" in refused(tmp_path / "model", small)
    assert "has 460 tokens, not more than that of MODEL" in refused(tmp_path / "model", old)
    other = refused(tmp_path / "model", vocabularies("zh", "bpe"))
    assert "does not extend that of MODEL" in other and "have other ids, first 259" in other
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "model" / name, bare)
    assert "has no tokenizer, so the new tokens cannot be determined" in refused(bare, merged)
