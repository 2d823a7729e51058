"""The chat in a terminal and printed completions, of a chat that answers by a list: what is said,
in which order, and where.
"""

import signal
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dolmen.cli.generation import CHAT_HELP, CompletionPrinter, Terminal


@dataclass
class Chat:
    """A chat that spells each message backwards, one character at a time."""

    messages: list[dict[str, str]] = field(default_factory=list)
    truncated: bool = False
    stopped: bool = False
    interrupted_at: int | None = None
    config = SimpleNamespace(sampling_params=SimpleNamespace(max_new_tokens=1200))

    def reset(self) -> None:
        self.messages = []

    def undo(self) -> str | None:
        if not self.messages:
            return None
        *self.messages, message, _ = self.messages
        return message["content"]

    def stop(self) -> None:
        self.stopped = True

    def reply(self, text: str):
        if text == "bad":
            raise ValueError("the chat is too long")
        self.stopped, said = False, ""
        for place, character in enumerate(reversed(text)):
            if place == self.interrupted_at:
                signal.raise_signal(signal.SIGINT)
            if self.stopped:
                break
            said += character
            yield character
        self.messages += [{"role": "user", "content": text}, {"role": "model", "content": said}]


def talk(monkeypatch, capsys, lines: list[Any], **chat) -> tuple[str, str, list[str]]:
    """What is printed to stdout and stderr, and the prompts; a line may be an error to raise."""
    prompts, left = [], iter(lines)

    def read(prompt: str) -> str:
        prompts.append(prompt)
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    interactive = bool(chat.pop("interactive", False))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: interactive))
    Terminal(Chat(**chat)).talk()
    return *capsys.readouterr(), prompts


def test_lines_are_messages_or_commands(monkeypatch, capsys):
    lines = ["/retry", " ab ", "", "/history", "/retry", "/reset", "/history", "/what is", "bad"]
    out, err, prompts = talk(monkeypatch, capsys, [*lines, "cd", "/exit", "never"])
    assert out == "ba\nba\ndc\n"
    assert err.splitlines() == [
        "there is no message to reply to yet",
        "user: ab",
        "model: ba",
        "started a new chat",
        "there is no command /what: /help lists the commands",
        "the chat is too long",
    ]
    assert prompts == [""] * 11


def test_a_backslash_continues_a_message(monkeypatch, capsys):
    out, err, prompts = talk(monkeypatch, capsys, ["a\\", "b\\", "c", "/help"], interactive=True)
    assert out == "c\nb\na\n" and err == f"{CHAT_HELP}\n{CHAT_HELP}\n"
    assert prompts == ["> ", "  ", "  ", "> ", "> "]


def test_ctrl_c_interrupts_a_reply_or_says_how_to_leave(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)
    lines = ["abc", KeyboardInterrupt(), "/history"]
    out, err, _ = talk(monkeypatch, capsys, lines, interrupted_at=2)
    assert out == "cb\n" and signal.getsignal(signal.SIGINT) is before
    assert err == "\n/exit or Ctrl-D ends the chat\nuser: abc\nmodel: cb\n"


def test_a_truncated_reply_says_the_limit(monkeypatch, capsys):
    _, err, _ = talk(monkeypatch, capsys, ["ab"], truncated=True)
    assert err == "(the reply was truncated at 1,200 tokens: increase --max-new-tokens)\n"


class Letters:
    """A detokenizer of letters, which keeps each until the next, and stops after an x."""

    def __init__(self):
        self.tokens: list[int] = []
        self.whole, self.stopped = "", None

    def add(self, token: int) -> str:
        new, self.tokens = "".join(map(chr, self.tokens[-1:])), [*self.tokens, token]
        self.whole += chr(token)
        self.stopped = 0 if token == ord("x") else None
        return new

    def end(self) -> str:
        return "".join(map(chr, self.tokens[-1:]))


@pytest.mark.parametrize("visible", [True, False])
def test_the_first_completion_is_printed_while_it_grows(capsys, visible):
    printer = CompletionPrinter([Letters() for _ in range(3)], ["P", "Q", "R"], visible)
    shown, stopped = [], []
    for index, letter in ((1, "d"), (0, "a"), (0, "b"), (1, "x"), (0, "c")):
        stopped.append(printer.add(index, ord(letter)))
        shown.append(capsys.readouterr().out)
    printer.end()
    shown.append(capsys.readouterr().out)
    assert stopped == [False, False, False, True, False]
    assert shown == (["", "P", "a", "", "b", "c\nQdx\n"] if visible else [""] * 6)
