"""The files of a tokenizer, checked before `transformers` reads them.

A tokenizer.json brings regular expressions, and whether one of them takes for ever on some text
cannot be decided by looking at it. Oniguruma, which runs them, gives up after 10^7 steps of one
match (0.2 to 0.4 s), and `tokenizers` panics then. So every expression is tried, in a process of
its own with a limit of time and memory, on the texts that show the usual mistakes: runs of one kind
of character, then one that does not fit. What gets through can be slow on text that was not tried,
or panic there, which `refused_by_name` turns into words; a sentencepiece or tiktoken model has no
expressions of its own here and is bounded in size alone.

It brings normalizers too, and three that each put 900 letters in place of one make a text 729
million times as long: the allocation fails, which ends the process. What each step can add is in
the file, so the product over the steps is bounded before any text is read. A trial would not find
the character that a hostile file waits for.
"""

import base64
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from dolmen.files import gate, kinds, sentencepiece_model
from dolmen.files.gate import refuse

# Runs Python code in a subprocess with limits on CPU time and memory, for work that a hostile file
# can make endless and that cannot be interrupted in this process: matching its regular expressions.

PRELUDE = """
import json, resource, sys
inputs = json.load(sys.stdin)
sys.path[:] = inputs["path"]
def limit():
    resource.setrlimit(resource.RLIMIT_CPU, (inputs["seconds"],) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (inputs["memory"],) * 2)
"""
OVER_TIME = (-signal.SIGXCPU, -signal.SIGKILL)
"""Exit codes of a process that has used its CPU time."""


def run_limited(
    code: str, inputs: Mapping[str, Any], *, seconds: int, memory: int
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a subprocess and return its exit code and output. The code finds its input in
    the dict `inputs` and calls `limit()` after its imports: from there on it has `seconds` of CPU
    time and `memory` bytes.
    """
    # -I: nothing is imported from the working folder, so modules are found on our own path
    path = [path for path in sys.path if path]
    request = {**inputs, "path": path, "seconds": seconds, "memory": memory}
    return subprocess.run(
        [sys.executable, "-I", "-c", PRELUDE + code],
        input=json.dumps(request),
        text=True,
        capture_output=True,
    )


SECONDS = 5  # of one core, for all expressions
MEMORY = 4 << 30
PANIC = 87
MAX_GROWTH = 64
"""Most times as long as the text that its normal form may be, in characters. Of 18 in the published
ones: NFKC makes 18 characters of U+FDFA."""
MATCHES_NOTHING = re.compile(r"[*?|^$]|\{0|\{,|\\[bBAZzGK]")
"""Parts of a regular expression that can match between two characters. (A `+` cannot.)"""
PROBE = """
from tokenizers import Tokenizer
limit()
try:
    tokenizer = Tokenizer.from_str(json.dumps(inputs["tokenizer"]))
except Exception:
    sys.exit(0)  # transformers will say it in words
try:
    for text in inputs["texts"]:
        if tokenizer.normalizer:
            tokenizer.normalizer.normalize_str(text)
        if tokenizer.pre_tokenizer:
            tokenizer.pre_tokenizer.pre_tokenize_str(text)
        if tokenizer.decoder:
            tokenizer.decoder.decode([text])
except MemoryError:
    sys.exit(PANIC)
except Exception:
    sys.exit(0)
except BaseException:  # a panic of Rust
    sys.exit(PANIC)
""".replace("PANIC", str(PANIC))
# its own code, and those of the limit of time; anything else says nothing about an expression
VERDICTS = (PANIC, *OVER_TIME)
UNITS = (
    "a",
    "A",
    "1",
    " ",
    "\n",
    "\t",
    "\r\n",
    "-",
    ".",
    "'s",
    "a ",
    "a1",
    "ab",
    "é",
    "中",
    "\u0301",
)
TEXTS = [unit * many + end for many in (8, 32, 1000) for unit in UNITS for end in ("", "b", "\0")]


def check_files(folder: Path, probe: bool = True) -> None:
    """Check every tokenizer file in `folder`: size, schema, growth by normalizers, and with `probe`
    its regular expressions in a subprocess (one process per host should). Raises Refused.
    """
    for name, kind in kinds.TOKENIZER_FILES.items():
        if (folder / name).exists():
            content = gate.read_json(folder / name, kind)
            if name == "tokenizer.json":
                check_growth(folder / name, content)
                if probe:
                    check_expressions(folder / name, content)
    for name in ("merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"):
        if (folder / name).exists():
            content = gate.read_bytes(folder / name, kinds.VOCAB.size)
            if name.endswith(".model") and not (folder / "tokenizer.json").exists():
                times = longest_replacement(sentencepiece_model.charsmap(content))
                check_times(folder / name, "normalizer", times)


def check_growth(file: Path, content: dict) -> None:
    """Raise Refused if the normalizers or decoders of a tokenizer.json can make a text more than
    MAX_GROWTH (64) times as long.
    """
    check_times(
        file, "normalizer", growth([content.get("normalizer"), content.get("pre_tokenizer")])
    )
    check_times(file, "decoder", growth(content.get("decoder")))


def check_times(file: Path, step: str, times: int) -> None:
    """Raise Refused if `times`, by how much `step` of a tokenizer can lengthen a text, exceeds
    MAX_GROWTH (64).
    """
    if times > MAX_GROWTH:
        raise refuse(
            file,
            f"its {step} can make a text {float(times):.3g} times as long, more than the allowed "
            f"{MAX_GROWTH} times",
        )


def growth(step: Any) -> int:
    """Return how many times as long, in characters, a normalizer, pre-tokenizer or decoder can make
    a text. Unicode's normal forms count as 1: applied twice they change nothing more.
    """
    if isinstance(step, list):
        return math.prod(map(growth, step))
    if not isinstance(step, dict):
        return 1
    match step:
        case {"type": "Replace", "content": str(new), "pattern": {"String": str(old)}}:
            return max(1, math.ceil(len(new) / len(old))) if old else 1 + len(new)
        case {"type": "Replace", "content": str(new), "pattern": {"Regex": str(expression)}}:
            return max(1, len(new)) + bool(new and MATCHES_NOTHING.search(expression))
        case {"type": "Prepend", "prepend": str(new)}:
            return 1 + len(new)
        case {"type": "Precompiled", "precompiled_charsmap": str(packed)}:
            try:
                return longest_replacement(base64.b64decode(packed))
            except ValueError:  # which `tokenizers` refuses
                return 1
        case {"type": "BertNormalizer"}:  # a space on each side of a Chinese character
            return 3
        case {"type": "ByteLevel"}:  # a letter for each byte, of which a character has up to 4
            return 4
    # a sequence of steps, or a step with parts
    return math.prod(growth(part) for part in step.values())


def longest_replacement(charsmap: bytes) -> int:
    """Return the most characters that a charsmap of sentencepiece puts in place of one: it is the
    length of a trie in 4 bytes, the trie, and the replacements, each with a zero at its end.
    """
    # behind the trie
    replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(1, *(len(part.decode(errors="replace")) for part in replacements.split(b"\0")))


def check_expressions(file: Path, content: dict) -> None:
    """Try the regular expressions of a tokenizer.json in a limited subprocess. Raises Refused if
    one fails or takes too long or too much memory on TEXTS (runs of one kind of character), or if
    they cannot be tried.
    """
    steps = {name: content.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    if not any(True for _ in expressions(steps)):
        return
    # without the vocabulary: loading it would take most of the time
    bare = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, **steps}
    code, output = try_expressions(json.dumps(bare))
    if code in VERDICTS or "memory allocation of" in output:
        longest = max(expressions(steps), key=len)
        raise refuse(
            file,
            f"a regular expression fails, or takes too long or too much memory, on "
            f"{max(map(len, TEXTS)):,} letters "
            f"(the longest is {ascii(longest)[:200]})",
        )
    if code:
        raise refuse(
            file,
            f"its regular expressions could not be tested: the process for it, {sys.executable}, "
            f"ended with code {code}: {output[-600:]}",
        )


@cache
def try_expressions(tokenizer: str) -> tuple[int, str]:
    """Return the exit code and stderr of the subprocess that tries a tokenizer.json on TEXTS (runs
    of one kind of character). Results are cached by its text, as a start looks at its tokenizer
    several times.
    """
    request = {"tokenizer": json.loads(tokenizer), "texts": TEXTS}
    ended = run_limited(PROBE, request, seconds=SECONDS, memory=MEMORY)
    return ended.returncode, ended.stderr


def expressions(value: Any) -> Iterator[str]:
    """Yield every regular expression in a part of a tokenizer.json (nested dicts and lists)."""
    if isinstance(value, dict):
        if isinstance(value.get("Regex"), str):
            yield value["Regex"]
        for part in value.values():
            yield from expressions(part)
    elif isinstance(value, list):
        for part in value:
            yield from expressions(part)


@contextmanager
def refused_by_name(name: Path | str) -> Iterator[None]:
    """Turn a panic of `tokenizers` within this context into Refused of `name`: it is no Exception,
    and would leave as a traceback of Rust and one of Python.
    """
    try:
        yield
    except BaseException as error:
        # PanicException, which cannot be imported
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise refuse(name, f"the tokenizer fails: {error}") from error
