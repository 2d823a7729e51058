"""Tokenizers: what is refused, and that the one we train gives every text back."""

import base64
import json
import random

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from dolmen.data import tokenizer as tokenizers
from dolmen.data.corpus import open_text
from dolmen.data.sources import resolve_sources, standard_library_files
from dolmen.data.tokenise import cut
from dolmen.files import tokenizer_files
from dolmen.files.gate import Refused
from dolmen.files.sentencepiece_model import CHARSMAP, NORMALIZER, record

WORDS = {"<s>": 0, "a": 1, "b": 2, "</d>": 3}


def words(**special):
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(WORDS, unk_token="<s>")), **special
    )


def test_trained_bpe_gives_every_text_back(tokenizer, tokenizer_folder):
    source = "".join(file.read_text("utf-8") for file in standard_library_files()[:8])
    noise = "".join(
        map(chr, random.Random(0).choices([*range(0xD800), *range(0xE000, 0x11000)], k=2000))
    )
    spaces = "  a .  b , c 's\t\n\n\r\n   \n\tx  "
    encode = tokenizers.encoder(tokenizer)
    for text in (source, noise, spaces):
        assert tokenizer.decode(encode(text)) == text
    again = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert (
        again.eos_token == again.bos_token == again.pad_token == "<|endoftext|>"
        and again.eos_token_id == 0
    )
    assert len(again) == 300


def test_encoder_is_the_tokenizer(tokenizer):
    text = "def f(x):\n    return x + 1\n<|endoftext|>é" * 300
    assert (
        tokenizers.encoder(tokenizer)(text).tolist()
        == tokenizer(text, add_special_tokens=False)["input_ids"]
    )
    tokenizer(text, truncation=True, max_length=5)
    assert len(tokenizers.encoder(tokenizer)(text)) > 1000, (
        "a truncation of an earlier call does not stay"
    )
    slow = ByT5Tokenizer()
    assert (
        tokenizers.encoder(slow)("hé").tolist() == slow("hé", add_special_tokens=False)["input_ids"]
    )


def test_pieces_do_not_change_tokens(tokenizer):
    text = "".join(
        f"class A{i}:\n\n    def f(self):\n        return {i} + 1\n\n\n" for i in range(300)
    )
    encode = tokenizers.encoder(tokenizer)
    parts = [encode(piece) for piece, _ in cut([text], piece=1000)]
    assert len(parts) > 5 and np.concatenate(parts).tolist() == encode(text).tolist()


def test_end_of_text(tokenizer):
    assert tokenizers.end_of_text_id(tokenizer) == 0
    assert tokenizers.end_of_text_id(words(eos_token="</d>")) == 3
    assert tokenizers.end_of_text_id(words(), "</d>") == 3
    with pytest.raises(
        ValueError, match="defines no EOS token .*use --data.end-of-text TOKEN .*<s>"
    ):
        tokenizers.end_of_text_id(words(bos_token="<s>"))
    with pytest.raises(
        ValueError, match="--data.end-of-text '<eot>' is not one of the tokenizer's 4 tokens"
    ):
        tokenizers.end_of_text_id(words(), "<eot>")


def test_vocabulary(tokenizer):
    tokenizers.check_vocabulary(tokenizer, 300)
    with pytest.raises(
        ValueError,
        match="has 300 tokens, but the model's vocab_size is 299: use --model.vocab-size 300",
    ):
        tokenizers.check_vocabulary(tokenizer, 299)
    gap = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, unk_token="a"))
    )
    assert tokenizers.vocabulary_size(gap) == 70_001
    assert (
        tokenizers.token_dtype(gap) == np.uint32 and tokenizers.token_dtype(tokenizer) == np.uint16
    )
    assert tokenizers.encoder(gap)("b").tolist() == [70_000]


def test_fingerprint(tokenizer, tokenizer_folder):
    before = tokenizers.fingerprint(tokenizer)
    tokenizer("a b c", truncation=True, max_length=2)
    again = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert tokenizers.fingerprint(tokenizer) == tokenizers.fingerprint(again) == before
    changed = AutoTokenizer.from_pretrained(tokenizer_folder)
    changed.add_tokens(["new"])
    assert tokenizers.fingerprint(changed) != before
    assert tokenizers.fingerprint(ByT5Tokenizer()) == tokenizers.fingerprint(ByT5Tokenizer())
    assert tokenizers.fingerprint(ByT5Tokenizer()) != tokenizers.fingerprint(
        ByT5Tokenizer(extra_ids=10)
    )


def test_no_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer: use --data.tokenizer"):
        tokenizers.load_tokenizer(None)
    with pytest.raises(FileNotFoundError, match="--data.tokenizer /no/such: no such folder"):
        tokenizers.load_tokenizer("/no/such")
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        tokenizers.load_tokenizer(str(tmp_path))
    for model_type in ("gpt2", "qwen3", "gemma", "gemma2"):  # Gemma's would have 5 special tokens
        (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
        with pytest.raises(ValueError, match="no tokenizer files there"):
            tokenizers.load_tokenizer(str(tmp_path))


def test_added_tokens_that_are_no_list_are_refused(tmp_path):
    """`transformers` fails on them with "'NoneType' object is not iterable"."""
    content = {"version": "1.0", "added_tokens": None, "model": {"type": "BPE", "vocab": {}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(Refused, match=r"tokenizer.json: added_tokens is null: it must be a list"):
        tokenizer_files.check_files(tmp_path)


def test_bpe_needs_the_bytes(tmp_path):
    with pytest.raises(ValueError, match="vocab_size is 256: use --model.vocab-size 257"):
        tokenizers.train_bpe(["a"], 256, tmp_path / "t", progress=False)
    assert not (tmp_path / "t").exists()


def test_a_tokenizer_that_gives_no_tokens_is_refused(tmp_path, load, documents):
    """As `transformers` makes of a bare sentencepiece model: a vocabulary that no text reaches."""
    bare = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "\u2581\u2581x": 2}, []))
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="</s>").save_pretrained(tmp_path / "t")
    with pytest.raises(ValueError, match="gives no tokens for the text of .*'line 0 of"):
        load(documents, tokenizer=str(tmp_path / "t"))
    assert not (tmp_path / "cache").exists()
    blank = tokenizers.load_tokenizer(str(tmp_path / "t"))
    (source,) = resolve_sources([str(documents)])
    with pytest.raises(ValueError, match="no tokens for any of the 40 documents"):
        open_text(source, blank, 1, "text", tmp_path / "cache", progress=False)


def with_expression(folder, expression):
    """A tokenizer whose text is split by `expression`."""
    bare = Tokenizer(models.BPE({"a": 0, "b": 1, "</s>": 2}, []))
    bare.pre_tokenizer = pre_tokenizers.Split(Regex(expression), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="</s>").save_pretrained(folder)
    return folder


def test_only_the_probe_blames_an_expression(tmp_path, monkeypatch):
    """Where the probe itself does not run, the message is its own, and the tokenizer is not."""
    tokenizer_files.try_expressions.cache_clear()
    with pytest.raises(Refused, match="a regular expression fails, or takes too long.*a\\+\\)\\+"):
        tokenizer_files.check_files(with_expression(tmp_path / "slow", "(a+)+$"))
    good = with_expression(tmp_path / "good", "a+b")
    monkeypatch.setattr(tokenizer_files, "PROBE", "import no_such_module")
    with pytest.raises(Refused, match="could not be tested.*No module named 'no_such_module'"):
        tokenizer_files.check_files(good)
    tokenizer_files.try_expressions.cache_clear()
    for code in ("import os; os.kill(os.getpid(), 15)", "import os; os.abort()", "exit(3)"):
        monkeypatch.setattr(tokenizer_files, "PROBE", code)
        with pytest.raises(Refused, match="could not be tested.*ended with code"):
            tokenizer_files.check_files(good)
        tokenizer_files.try_expressions.cache_clear()
    for code in ("SIGXCPU", "SIGKILL"):
        monkeypatch.setattr(
            tokenizer_files, "PROBE", f"import os, signal; os.kill(os.getpid(), signal.{code})"
        )
        with pytest.raises(Refused, match="a regular expression fails, or takes too long"):
            tokenizer_files.check_files(good)
        tokenizer_files.try_expressions.cache_clear()


def test_an_expression_that_fills_the_memory_is_blamed(tmp_path, monkeypatch):
    tokenizer_files.try_expressions.cache_clear()
    code = "import os; os.write(2, b'memory allocation of 9 bytes failed'); os.abort()"
    monkeypatch.setattr(tokenizer_files, "PROBE", code)
    with pytest.raises(Refused, match="or too much memory"):
        tokenizer_files.check_files(with_expression(tmp_path / "good", "a+b"))
    tokenizer_files.try_expressions.cache_clear()


def charsmap(replacement):
    return (8).to_bytes(4, "little") + bytes(8) + f"ab\0{replacement}\0".encode()


def test_growth_of_a_text_is_bounded_by_what_each_step_can_add():
    """Each step beside what `tokenizers` makes of the text that it grows most on."""
    cases = [
        (normalizers.Replace("ab", "xyz"), "ab", 2),
        (normalizers.Replace("a", "x" * 900), "a", 900),
        (normalizers.Replace("", "xy"), "a", 3),
        (normalizers.Replace(Regex("[ab]+"), "xyz"), "a", 3),
        (normalizers.Replace(Regex("(?=a)"), "xyz"), "a", 4),
        (normalizers.Replace(Regex("a{0,2}|b"), "x"), "b", 2),
        (normalizers.Replace(Regex("a"), ""), "a", 1),
        (normalizers.Prepend("xy"), "a", 3),
        (normalizers.ByteLevel(), "\U00010348", 4),
        (normalizers.BertNormalizer(), "\u4e2d", 3),
        (normalizers.NFKC(), "a", 1),
        (normalizers.Sequence([normalizers.Replace("a", "bb"), normalizers.Prepend("x")]), "a", 4),
    ]
    for normalizer, text, want in cases:
        bare = Tokenizer(models.BPE())
        bare.normalizer = normalizer
        step = json.loads(bare.to_str())["normalizer"]
        assert tokenizer_files.growth(step) == want, step
        assert len(normalizer.normalize_str(text)) <= want * (len(text) + 1), step
    packed = base64.b64encode(charsmap("x" * 70)).decode()
    step = {"type": "Precompiled", "precompiled_charsmap": packed}
    assert tokenizer_files.growth([step, None, {"type": "Replace", "content": 3}]) == 70


def test_a_tokenizer_that_makes_texts_too_long_is_refused(tmp_path):
    """What three normalizers of 3 kB made of 20 letters took 8.7 GB, and ended the process."""
    steps = [normalizers.Replace(old, new * 900) for old, new in ("ab", "bc", "cd")]
    folder = with_expression(tmp_path / "t", "a+b")
    content = json.loads((folder / "tokenizer.json").read_text())
    bare = Tokenizer(models.BPE())
    bare.normalizer = normalizers.Sequence(steps)
    content["normalizer"] = json.loads(bare.to_str())["normalizer"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(Refused, match="its normalizer can make a text 7.29e\\+08 times as long"):
        tokenizer_files.check_files(folder, probe=False)
    decoder = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 65}
    content |= {"normalizer": None, "decoder": decoder}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(Refused, match="its decoder can make a text 65 times as long"):
        tokenizer_files.check_files(folder, probe=False)


def test_a_sentencepiece_model_that_makes_texts_too_long_is_refused(tmp_path):
    def write(replacement):
        content = record(NORMALIZER, record(CHARSMAP, charsmap(replacement)))
        (tmp_path / "tokenizer.model").write_bytes(content)

    write("x" * 65)
    with pytest.raises(Refused, match="tokenizer.model: its normalizer can make a text 65 times"):
        tokenizer_files.check_files(tmp_path)
    write("x" * 64)
    tokenizer_files.check_files(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\n")  # tiktoken's
    tokenizer_files.check_files(tmp_path)


def test_the_probe_imports_from_where_we_do(tmp_path, monkeypatch):
    """-I leaves PYTHONPATH and the user's packages out; sys.path is handed over."""
    (tmp_path / "only_here.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    probe = tokenizer_files.PROBE.replace("from tokenizers", "import only_here\nfrom tokenizers")
    monkeypatch.setattr(tokenizer_files, "PROBE", probe)
    tokenizer_files.try_expressions.cache_clear()
    tokenizer_files.check_files(with_expression(tmp_path / "good", "a+b"))
    tokenizer_files.try_expressions.cache_clear()


def test_expressions_are_tried_once_per_host(tmp_path, load, monkeypatch):
    tried = []
    text = tmp_path / "a.txt"
    text.write_text("ab" * 500)
    monkeypatch.setattr(
        tokenizer_files, "try_expressions", lambda text: tried.append(text) or (0, "")
    )
    folder = with_expression(tmp_path / "t", "a+b")
    tokenizers.load_tokenizer(str(folder))
    tokenizers.load_tokenizer(str(folder), probe=False)
    assert len(tried) == 1
    load(text, tokenizer=str(folder), verify=False)
    assert len(tried) == 1, "who does not start the run trusts who does"
    load(text, tokenizer=str(folder))
    assert len(tried) == 2


def test_text_of_white_space_alone_may_have_no_tokens(tmp_path):
    """A tokenizer that drops white space is no broken one."""
    blank = tokenizers.load_tokenizer(str(with_expression(tmp_path / "t", "a+b")))
    tokenizers.check_encodes(blank, " \n\t ", "x.txt")
    with pytest.raises(ValueError, match="no tokens for the text of x.txt"):
        tokenizers.check_encodes(blank, " c\n", "x.txt")
