"""Damage, by seed: what disks, editors and hostile hands do to a file."""

import json
import random
import re
from typing import Any

SCALAR = re.compile(rb'-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|"(?:[^"\\]|\\.)*"|\b(?:true|false|null)\b')
WORDS = (
    *(b"null", b"true", b"-1", b"0", b"1e999", b"-0.0", b"NaN", b"-Infinity", b'""', b'"x"'),
    *(b"[]", b"{}", b"[[]]", b"9" * 30, b"9" * 5000, b'"\\ud800"', b"1" * 19, b"0.5", b"*a", b"&a"),
    *(b'"' + b"a" * 10_000 + b'"', b"!!python/name:os.system", b"'", b"- ", b"? ", b"{", b"]"),
)
VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 1e308, 0.5, "", "x", "\ud800", "1"),
    *([], {}, [[]], [None], {"a": 1}, [0, 1, 2], "a" * 10_000, ["x"] * 3, -0.0, "../x", "\0"),
)


def damaged(data: bytes, seed: str) -> bytes:
    """`data` after one to three mutations, the same for the same seed."""
    chance = random.Random(seed)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        change = chance.choice(CHANGES)
        data = change(data, chance)
    return data


def flip(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 8)) if data else 0):
        out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
    return bytes(out)


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def leave_out(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data) + 1)
    return data[:start] + data[start + chance.choice((1, 2, 7, 64)) :]


def repeat(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data) + 1)
    part = data[start : start + chance.choice((1, 7, 64, 512))]
    return data[:start] + part * chance.choice((2, 3, 100)) + data[start + len(part) :]


def insert(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data) + 1)
    return data[:start] + chance.randbytes(chance.choice((1, 2, 8, 100))) + data[start:]


def nest(data: bytes, chance: random.Random) -> bytes:
    """Brackets by the thousand, where a value stands or anywhere."""
    many = chance.choice((33, 100, 1000, 20_000))
    opening, closing = chance.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"{", b"}"), (b"- ", b"")))
    inner = opening * many + b"0" + closing * (many if chance.random() < 0.7 else 0)
    return _in_place_of_a_scalar(data, inner, chance)


def another_scalar(data: bytes, chance: random.Random) -> bytes:
    return _in_place_of_a_scalar(data, chance.choice(WORDS), chance)


def _in_place_of_a_scalar(data: bytes, word: bytes, chance: random.Random) -> bytes:
    found = [match.span() for match in SCALAR.finditer(data)]
    at = chance.randrange(len(data) + 1)
    start, stop = chance.choice(found) if found else (at, at)
    return data[:start] + word + data[stop:]


def another_line(data: bytes, chance: random.Random) -> bytes:
    """A line twice, gone, or in another place."""
    lines = data.splitlines(keepends=True)
    if not lines:
        return data
    line = lines[chance.randrange(len(lines))]
    if chance.random() < 0.5:
        lines.remove(line)
    if chance.random() < 0.7:
        lines.insert(chance.randrange(len(lines) + 1), line)
    return b"".join(lines)


def another_value(data: bytes, chance: random.Random) -> bytes:
    """Where it is JSON: a part of another type, gone, or twice."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return flip(data, chance)
    places = list(_places(document))
    if not places:
        return json.dumps(chance.choice(VALUES)).encode()
    holder, key = chance.choice(places)
    match chance.randrange(5):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            text = json.dumps(document)
            name = json.dumps(key)
            return text.replace(
                f"{name}:", f"{name}: {json.dumps(holder[key])}, {name}:", 1
            ).encode()
        case 2 if isinstance(holder, dict):
            holder[chance.choice(("", "x", "\ud800", "a" * 5000, key + " "))] = holder.pop(key)
        case _:
            holder[key] = chance.choice(VALUES)
    return json.dumps(document).encode()


def _places(value: Any):
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


CHANGES = (
    *(flip, cut, leave_out, repeat, insert, nest, another_scalar, another_line),
    *(another_value, another_value, another_value),
)
