"""Chats: what form their rows have, how they become tokens, what of them is trained, how they are
packed, and what a batch of them is, each against a plain reading of the same.
"""

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_sources import write_parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dolmen.data import readers
from dolmen.data.config import DataConfig
from dolmen.data.examples import chat_of, chats
from dolmen.data.inputs import check_chats
from dolmen.data.packing import pack, pack_pairs
from dolmen.data.sources import DataSource, resolve_sources
from dolmen.data.template import TEMPLATES, Chat, Template
from dolmen.data.tokenise import first_lines
from dolmen.files.gate import Refused
from dolmen.ops.loss import IGNORED
from dolmen.serving.config import GenerateConfig

END = "<|endoftext|>"  # eos of the tests' tokenizer, and its padding
# ChatML whose turns end with the padding token, and which says nothing of what is generated
PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}"
    + END
    + "{% endgeneration %}{% else %}{{ m['content'] }}"
    + END
    + "{% endif %}"
    "{{ '\n' }}{% endfor %}"
)
TWICE = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "no  "},
]


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def said(row: dict) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in chat_of(row, "here").messages]


@pytest.mark.parametrize("answer", [" yes", "yes ", " ", " a  b "])
@pytest.mark.parametrize("text", [PLAIN, MARKED], ids=["matched", "marked"])
def test_offsets_that_are_trimmed_move_no_token_between_turns(text, answer):
    """As of tokenizers with ByteLevel(trim_offsets=True): the token of a space has no place."""
    inner = Tokenizer(models.BPE(dict(zip(ALPHABET, range(256), strict=True)), []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.ByteLevel(trim_offsets=True)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)
    messages = [
        {"role": "user", "content": " one "},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": " two"},
        {"role": "assistant", "content": "no"},
    ]
    whole, *turns = trained(tokenizer, text, "assistant", messages)
    assert turns == [f"{answer}{END}", f"no{END}"] and f">{answer}{END}" in whole


def test_forms_are_told_apart_by_their_fields():
    assert said({"messages": TWICE}) == [tuple(m.values()) for m in TWICE]
    shared = [("system", "s"), ("human", "q"), ("gpt", "a"), ("tool", "t"), ("Assistant", "b")]
    row = {"id": 7, "conversations": [{"from": who, "value": what} for who, what in shared]}
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert said(row) == list(zip(roles, "sqatb", strict=True))
    assert said({"instruction": "q", "input": "", "output": "a"}) == [
        ("user", "q"),
        ("assistant", "a"),
    ]
    row = {"instruction": "q", "input": "i", "output": "a", "system": "s", "messages": None}
    assert said(row) == [("system", "s"), ("user", "q\n\ni"), ("assistant", "a")]
    assert chat_of({"messages": TWICE, "weight": 2}, "here").weight == 2
    assert chat_of({"messages": TWICE, "weight": None}, "here").weight == 1


@pytest.mark.parametrize(
    "row, message",
    [
        ({"text": "x", "label": 1}, "not a chat, its keys are text, label"),
        ({"instruction": "x"}, "has no output"),
        ({"messages": []}, "messages has 0 entries"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content is a list"),
        ({"messages": "x"}, "messages is 'x'"),
        ({"conversations": [{"from": "martian", "value": "x"}]}, "`from` is 'martian'"),
        ({"messages": TWICE, "weight": -1}, "weight is -1"),
        ({"messages": TWICE, "weight": float("nan")}, "weight is nan"),
        ({"messages": TWICE, "weight": 1e300}, r"weight is 1e[+]300: it must be at most 1e[+]30"),
    ],
)
def test_what_is_no_chat_is_refused_by_its_row(row, message):
    with pytest.raises(Refused, match=f"a.jsonl, line 3: .*{message}"):
        chat_of(row, "a.jsonl, line 3")


def test_the_bytes_of_a_row_are_bounded(tmp_path):
    """In each kind of file, and before a line of a .jsonl is parsed."""
    row = {"messages": [{"role": "user", "content": "\u00e9" * 500}, *TWICE[2:3]]}
    size = len(json.dumps(row, ensure_ascii=False).encode())
    assert size > len(json.dumps(row, ensure_ascii=False)), "bytes are counted, not characters"
    (tmp_path / "a.jsonl").write_text(json.dumps(row, ensure_ascii=False), "utf-8")
    (tmp_path / "a.json").write_text(json.dumps([row]))
    write_parquet(tmp_path / "a.parquet", messages=[row["messages"]])
    for name in ("a.jsonl", "a.json", "a.parquet"):
        (source,) = resolve_sources([str(tmp_path / name)])
        for read in (chats, lambda source, size: first_lines(source, "text", size)):
            assert len(list(read(source, size))) == 1
            reported = (
                f"{name}, (line|row) 1: has more than {size - 1:,} bytes: .*--data.max-row-bytes"
            )
            with pytest.raises(Refused, match=reported):
                list(read(source, size - 1))
    (tmp_path / "b.jsonl").write_text("{" * 100)
    (source,) = resolve_sources([str(tmp_path / "b.jsonl")])
    with pytest.raises(Refused, match="has more than 99 bytes"):
        list(chats(source, 99))
    (tmp_path / "b.txt").write_text("x" * 100)
    (source,) = resolve_sources([str(tmp_path / "b.txt")])
    with pytest.raises(Refused, match="b.txt: has more than 99 bytes"):
        list(first_lines(source, "text", 99))
    assert DataConfig().max_row_bytes == GenerateConfig(folder="x").max_row_bytes == 4 << 20
    with pytest.raises(ValueError, match="max-row-bytes is 0"):
        DataConfig(rows="chats", max_row_bytes=0)
    with pytest.raises(ValueError, match="max-row-bytes are for chats"):
        DataConfig(max_row_bytes=100)


def test_chats_are_of_text_and_of_one_source():
    tokens = DataSource("a", None, (), (), indexed=(Path("a.bin"),))
    text = DataSource("a", None, (Path("a.jsonl"),), ())
    config = DataConfig(rows="chats", tokenizer="bpe:300")
    for sources, reported in (
        ((tokens,), "a.bin is tokenised already, but chats need text: use --data.rows text"),
        ((text, text), "--data.path has 2 weighted sources"),
        ((text,), "bpe:300"),
    ):
        with pytest.raises(ValueError, match=reported):
            check_chats(config, sources)
    check_chats(replace(config, tokenizer=None), (text,))
    check_chats(replace(config, rows="prompts"), (text,))


def test_a_json_file_may_be_just_as_long_as_the_bound(tmp_path, monkeypatch):
    """One byte more is refused by the bound, and not as damaged."""
    file = tmp_path / "a.json"
    file.write_text('[{"text": "a"}]')
    for size, fits in ((15, True), (14, False)):
        monkeypatch.setattr(readers, "ROWS", replace(readers.ROWS, size=size))
        refused = pytest.raises(ValueError, match="a.json: more than 14 bytes, the most")
        with nullcontext() if fits else refused:
            assert [row for row, _ in readers.json_rows(file)] == [{"text": "a"}]


def trained(tokenizer: PreTrainedTokenizerFast, text: str, train_on: str, messages=TWICE) -> list:
    """The whole text, and the pieces of it that are trained."""
    ids, marks = Template(tokenizer, text).tokens(Chat(messages, 1.0, "here"), train_on)
    edges = np.flatnonzero(np.diff(marks, prepend=False, append=False)).reshape(-1, 2)
    return [tokenizer.decode(ids)] + [tokenizer.decode(ids[a:b]) for a, b in edges]


@pytest.mark.parametrize("text", [PLAIN, MARKED], ids=["matched", "marked"])
def test_what_is_trained(tokenizer, text):
    """Answers and the token that ends each, which is padding too; nothing behind it."""
    assert tokenizer.pad_token == tokenizer.eos_token == END
    whole = "".join(f"<{m['role']}>{m['content']}{END}\n" for m in TWICE)
    answers = [f"yes{END}", f"no  {END}"]
    assert trained(tokenizer, text, "assistant") == [whole, *answers]
    assert trained(tokenizer, text, "last") == [whole, answers[1]]
    assert trained(tokenizer, text, "all") == [whole, whole]


def test_the_first_turn_may_be_an_answer(tokenizer):
    assert trained(tokenizer, PLAIN, "assistant", TWICE[2:3])[1:] == [f"yes{END}"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_ours(tokenizer, name):
    end = {"chatml": "<|im_end|>", "alpaca": END}[name]
    answers = [f"yes{end}", f"no  {end}"]
    whole, *found = trained(tokenizer, TEMPLATES[name], "assistant")
    assert found == answers
    chatml = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TWICE)
    alpaca = (
        f"be brief\n\n### Instruction:\none?\n\n### Response:\nyes{END}"
        f"### Instruction:\ntwo?\n\n### Response:\nno  {END}"
    )
    assert whole == {"chatml": chatml, "alpaca": alpaca}[name]


def test_a_template_that_writes_turns_otherwise_later_is_refused(tokenizer):
    """As one that leaves out what a model has thought, in all turns but the last."""
    text = "{% for m in messages %}{{ m['content'] if loop.last else '...' }}\n{% endfor %}"
    with pytest.raises(Refused, match="writes the first 3 messages differently .*generation"):
        trained(tokenizer, text, "assistant")
    assert len(trained(tokenizer, "{% generation %}" + text + "{% endgeneration %}", "last")) == 2


@pytest.mark.parametrize(
    "text, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "cannot render it: roles must alternate"),
        ("{% for m in %}", "cannot render it"),
        ("{{ messages[9]['content'].x }}", "cannot render it"),
        ("{# nothing #}", "renders it as empty text"),
    ],
)
def test_a_template_that_fails_is_told_with_the_row(tokenizer, text, message):
    with pytest.raises(Refused, match=f"here: the chat template {message}"):
        trained(tokenizer, text, "all")


def test_best_fit_decreasing():
    """Against the plain form of it, which looks at every row; all is there once."""
    draw = random.Random(0)
    for _ in range(30):
        room = draw.randint(1, 40)
        lengths = [draw.randint(0, room) for _ in range(draw.randint(0, 60))]
        rows: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            left = [room - sum(lengths[i] for i in row) for row in rows]
            fits = [n for n in range(len(rows)) if left[n] >= lengths[index]]
            if not fits:
                rows.append([index])
            else:
                rows[min(fits, key=lambda n: left[n])].append(index)
        found = pack(lengths, room)
        assert sorted(sum(found, [])) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in row) <= room for row in found)
        assert len(found) == len(rows)
    assert pack([3, 5, 2, 4, 1], 5) == [[1], [3, 4], [0, 2]]
    with pytest.raises(ValueError, match=r"6\) does not fit into 5"):
        pack([6], 5)


def test_two_by_two():
    """Each piece once, those of an item at the same number of two rows side by side, none over the
    room, and about as full as single ones would be.
    """
    generator = random.Random(0)
    prompts = [generator.randrange(20, 200) for _ in range(500)]
    lengths = np.array([[p + generator.randrange(10, 300) for _ in range(2)] for p in prompts])
    rows = pack_pairs(lengths, 512)
    assert sorted(piece for row in rows for piece in row) == list(range(1000))
    for first, second in zip(rows[0::2], rows[1::2], strict=True):
        assert [a // 2 for a in first] == [b // 2 for b in second]
    filled = [sum(lengths[piece // 2, piece % 2] for piece in row) for row in rows]
    assert max(filled) <= 512
    alone = len(pack(lengths.ravel().tolist(), 512))
    assert lengths.sum() / (512 * len(rows)) > 0.85 and len(rows) < 1.15 * alone
    with pytest.raises(ValueError, match=r"item \(600\) does not fit into 512"):
        pack_pairs(np.array([[3, 600]]), 512)


ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"{i} " + "why " * (i % 5)},
            {"role": "assistant", "content": "so " * (1 + i % 7)},
        ],
    }
    for i in range(60)
]


@pytest.fixture
def file(tmp_path):
    """Sixty chats, the last of which has no answer."""
    rows = [*ROWS[:-1], {"messages": ROWS[-1]["messages"][:1]}]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def of_chats(load, tmp_path):
    (tmp_path / "plain.jinja").write_text(PLAIN)

    def made(*path, **options):
        options = {"template": str(tmp_path / "plain.jinja"), "sequence_length": 96, **options}
        return load(*path, rows="chats", **options)

    return made


def texts(batch, tokenizer) -> list[tuple[str, str]]:
    """Each example of a batch: what it reads, and what it is to predict."""
    found = []
    for row, starts in enumerate(batch.documents.starts.tolist()):
        for first in sorted(set(starts)):
            here = [i for i, start in enumerate(starts) if start == first]
            ids, labels = batch.tokens[row, here], batch.labels[row, here]
            assert batch.positions.ids[row, 0, here].tolist() == list(range(len(here)))
            if (labels != IGNORED).any():
                real = labels[labels != IGNORED]
                found.append((tokenizer.decode(ids), tokenizer.decode(real)))
            else:
                assert not ids.any(), "padding"
    return found


def test_an_epoch_has_each_chat_once(of_chats, file, tokenizer):
    loader = of_chats(file, validation_fraction=0.2)
    held = [pair for b in loader.validation_batches() for pair in texts(b, tokenizer)]
    size = len(loader.mixture.rows)
    rows = [loader.mixture.batch(loader.mixture.read(n, 1)) for n in range(2 * size)]
    first, second = (
        [p for b in r for p in texts(b, tokenizer)] for r in (rows[:size], rows[size:])
    )
    assert first != second and sorted(first) == sorted(second)
    # the last token is no input, but is predicted
    want = [
        (f"<user>{q['content']}{END}\n<assistant>{a['content']}{END}", a["content"] + END)
        for q, a in (row["messages"] for row in ROWS[:-1])
    ]
    whole = tokenizer.encode("\n")
    assert len(whole) == 1, "which is all that an example of PLAIN has behind its end"
    assert sorted(first + held) == sorted(want) and 4 < len(held) < 24
    assert sum(b.real_tokens for b in rows[:size]) == loader.mixture.tokens
    assert sum(b.real_tokens for b in loader.validation_batches()) == loader.validation_tokens
    # as are the tokens that a validation is compared with: neither prompts nor padding
    share, batch = loader.validation_share(24)
    trained, held_out = loader.mixture.tokens, loader.validation_tokens
    assert share == held_out / (trained + held_out)
    assert batch == round(loader.global_batch_size * trained / size)
    assert loader.epochs(size) == {str(file): 4.0}, "of four rows"
    assert size < 20


def test_a_layout_changes_no_batch(of_chats, file):
    loader = of_chats(file, global_batch_size=4)
    whole = loader.batch(3)
    for part in range(2):
        mine, rows = loader.batch(3, part, 2), slice(2 * part, 2 * part + 2)
        assert mine.tokens.equal(whole.tokens[rows]) and mine.labels.equal(whole.labels[rows])
        assert mine.documents.starts.equal(whole.documents.starts[rows])
    loader.resume_at(3, 10)
    assert loader.batch(3).tokens[:2].equal(loader.mixture.batch(loader.mixture.read(10, 2)).tokens)


def test_weights_of_chats(of_chats, tmp_path, tokenizer):
    """Of each token of the chat; one of weight 0 is left out. Without any there are none."""
    path = tmp_path / "weighted.jsonl"
    rows = [{**row, "weight": i / 8} for i, row in enumerate(ROWS[:9])]
    path.write_text("\n".join(map(json.dumps, rows)))
    loader = of_chats(path, packing=False, validation_fraction=0, global_batch_size=8)
    batch = loader.batch(0)
    found = {}
    for row in range(8):
        (text, _), *more = texts(batch.split(8)[row], tokenizer)
        assert not more, "one in each row"
        real = batch.labels[row] != IGNORED
        (weight,) = set(batch.weights[row, real].tolist())
        found[text.split()[0]] = weight
        assert not batch.weights[row, ~real].any()
    assert found == {f"<user>{i}": i / 8 for i in range(1, 9)}
    assert "skipped: 1 chat without a trained token" in " ".join(loader.description.changes)


def test_files_of_any_form_are_the_same(of_chats, tmp_path, tokenizer):
    requested = [{"instruction": f"q{i}", "input": "", "output": f"a{i}"} for i in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, requested)))
    (tmp_path / "b.json").write_text(json.dumps(requested))
    write_parquet(
        tmp_path / "c.parquet", **{k: [row[k] for row in requested] for k in requested[0]}
    )
    shared = [
        [{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": f"a{i}"}] for i in range(8)
    ]
    write_parquet(tmp_path / "d.parquet", conversations=shared)
    batches = [
        of_chats(tmp_path / name, validation_fraction=0).batch(0)
        for name in ("a.jsonl", "b.json", "c.parquet", "d.parquet")
    ]
    for other in batches[1:]:
        assert other.tokens.equal(batches[0].tokens) and other.labels.equal(batches[0].labels)


def test_what_is_too_long_is_cut_and_told(of_chats, file, tokenizer):
    loader = of_chats(file, sequence_length=24, validation_fraction=0)
    assert max(loader.mixture.examples.places()) == 24
    assert "truncated at the end (--train.sequence-length)" in " ".join(loader.description.changes)
    for n in range(len(loader.mixture.rows)):
        batch = loader.mixture.batch(loader.mixture.read(n, 1))
        assert batch.tokens.shape == (1, 24) and batch.real_tokens


def test_one_example_is_shown_with_what_is_trained(of_chats, tmp_path):
    path = tmp_path / "one.jsonl"
    row = {"instruction": "[/bold]?", "output": "first\nsecond"}
    path.write_text(json.dumps(row))
    loader = of_chats(path, validation_fraction=0)
    want = f"<user>[/bold]?{END}\\n<assistant>»first\\nsecond{END}«\\n"
    assert loader.description.details[-1] == f"trained is marked by »« (chat 0): {want}"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"template": None}, "no chat template: give --data.template a Jinja file.*chatml, alpaca"),
        ({"template": "mine"}, "--data.template mine is neither a file nor one of"),
        ({"tokenizer": "bpe:300"}, "bpe:300 trains a tokenizer"),
        ({"sequence_length": 4}, "none is left to train on"),
    ],
)
def test_what_is_refused(of_chats, file, options, message):
    with pytest.raises(ValueError, match=message):
        of_chats(file, **options)


def test_chats_where_nothing_or_all_would_be_trained_are_refused(of_chats, tmp_path):
    requested = tmp_path / "asked.jsonl"
    requested.write_text(json.dumps({"messages": TWICE[:2]}))
    with pytest.raises(
        ValueError, match="none would be trained .--data.masking-strategy assistant"
    ):
        of_chats(requested)
    answered = tmp_path / "answered.jsonl"
    answered.write_text(json.dumps({"messages": TWICE}))
    every = tmp_path / "all.jinja"
    every.write_text("{% generation %}{{ messages[2]['content'] }}{% endgeneration %}")
    with pytest.raises(ValueError, match="all would be trained .*--data.masking-strategy all"):
        of_chats(answered, template=str(every))
    assert of_chats(answered, masking_strategy="all", validation_fraction=0).mixture.tokens
    text = tmp_path / "a.txt"
    text.write_text("no chat")
    with pytest.raises(ValueError, match="a.txt: chats must be rows"):
        of_chats(text)
    with pytest.raises(ValueError, match="0.5:|one data set: give paths without weights"):
        of_chats(f"0.5:{answered}", f"0.5:{requested}")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(ValueError, match="contains no chats"):
        of_chats(empty)


def test_options_of_chats_are_for_chats():
    with pytest.raises(ValueError, match="are for chats: use --data.rows chats"):
        DataConfig(template="chatml")
    with pytest.raises(ValueError, match="data.order megatron orders windows"):
        DataConfig(rows="chats", order="megatron")


def test_chats_are_tokenised_once(of_chats, file, monkeypatch, tmp_path):
    first = of_chats(file)
    monkeypatch.setattr(Template, "tokens", None)
    again = of_chats(file)
    assert again.batch(0).tokens.equal(first.batch(0).tokens)
    assert again.fingerprint() == first.fingerprint()
    with pytest.raises(TypeError):
        of_chats(file, masking_strategy="last")


def test_a_template_without_end_is_refused(tokenizer):
    """By its row, in the time that it has."""
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = Template(tokenizer, endless, seconds=0.2)
    with pytest.raises(Refused, match="line 3: .*cannot render it: it has taken over 0.2 s"):
        template.tokens(Chat(TWICE, 1.0, "line 3"), "all")
