"""A chat as tokens, by a chat template (Jinja, as transformers renders it), and which of them are
the assistant's.

Where the template marks what is generated ({% generation %}), the marks say it. Where it does not,
the beginnings of the chat do: what the whole text has more than the messages before a turn, with
the prompt to answer them, and no more than the messages up to its end. That includes the token that
ends the turn, which is learned whatever else it stands for, padding too; white space behind it is
not, as nothing is drawn any more there.

    render(messages[:i], prompt to answer)  <|user|>Hi<|end|>\n<|assistant|>
    render(messages[:i + 1])                <|user|>Hi<|end|>\n<|assistant|>Hello<|end|>\n
    trained                                                             Hello<|end|>

A template is code that others wrote, so a chat must be rendered within a time limit: an alarm of
the system interrupts it in the main thread; in any other, which gets no alarm, an exception that
the interpreter raises there at its next instruction.
"""

import ctypes
import os.path
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, Never

import numpy as np

from dolmen.core.filesystem import expand
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.files import gate
from dolmen.files.kinds import TEMPLATE_SIZE


class TimeLimitExceeded(Exception):
    """Raised in code that runs longer than its limit."""


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Context manager: raise TimeLimitExceeded in the code inside once it has run for `seconds`: in
    the main thread whatever it does, in any other at its next Python instruction.
    """
    # only the main thread handles signals
    main = threading.current_thread() is threading.main_thread()
    try:
        with _alarm(seconds) if main else _async_exception(seconds):
            yield
    except TimeLimitExceeded:
        raise TimeLimitExceeded(f"it has taken over {seconds:g} s") from None


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Context manager: raise TimeLimitExceeded in the main thread after `seconds`, by SIGALRM; the
    timer is stopped and the previous handler restored at the end.
    """

    def stop(number: int, frame: FrameType | None) -> Never:
        """Handle the signal: raise TimeLimitExceeded wherever the main thread is."""
        raise TimeLimitExceeded

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _async_exception(seconds: float) -> Iterator[None]:
    """Context manager: have the interpreter raise TimeLimitExceeded in this thread at its next
    Python instruction after `seconds`, unless the code inside has finished.
    """
    thread, lock, over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False
    schedule = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def stop() -> None:
        """Schedule the exception, from the timer's thread, unless the code has finished."""
        with lock:
            if not over:
                schedule(thread, ctypes.py_object(TimeLimitExceeded))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        # Either `stop` sees that it is over, or its exception is raised at a call below at the
        # latest. Withdrawing it instead (schedule NULL) would leave the interpreter's flag set:
        # every later call of every thread takes the slow path, and traced threads hang (3.11).
        with lock:
            over = True
        timer.cancel()


MaskingStrategy = Literal["assistant", "last", "all"]

SECONDS = 10.0  # for a chat
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# For tokenizers that have none: ChatML, and the words of github.com/tatsu-lab/stanford_alpaca. A
# line end behind a block is Jinja's own, so one that is meant is an expression.
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
        "{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "alpaca": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}### Response:\n"
        "{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}"
        "{% elif m['role'] == 'system' %}{{ m['content'] }}\n\n"
        "{% else %}### Instruction:\n{{ m['content'] }}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
}


ASSISTANT = "assistant"


@dataclass(frozen=True)
class Chat:
    """Messages as a chat template takes them, each with its `role` and `content`."""

    messages: list[dict[str, Any]]
    weight: float
    """Weight of the loss of its tokens."""
    where: str
    """File and row, for error messages."""
    preference: float = 0.0
    """Label of the row: the margin of a pair, or whether a completion is wanted (1 or -1).
    """


@dataclass(frozen=True, eq=False)
class Template:
    """A chat template with its tokenizer."""

    tokenizer: PreTrainedTokenizer
    text: str
    """The template, in Jinja."""
    seconds: float = SECONDS
    """Time limit for rendering a chat: a loop in a template can be endless."""

    @property
    def marks(self) -> bool:
        """True if the template marks generated text itself ({% generation %})."""
        return MARK.search(self.text) is not None

    def tokens(self, chat: Chat, train_on: MaskingStrategy) -> tuple[np.ndarray, np.ndarray]:
        """Return (token ids of the rendered chat, mask of the trained ones): those of the
        assistant's turns ("assistant"), of its last turn ("last"), or all. Raises ValueError for a
        chat that the template cannot render.
        """
        text, spans = self._render_marked(chat) if self.marks else self._render_matched(chat)
        ids, turns = self._encode(text, spans)
        if not len(ids):
            raise gate.refuse(chat.where, "the chat template renders it as empty text")
        if train_on == "all":
            return ids, np.ones(len(ids), bool)
        trained = np.zeros(len(ids), bool)
        for turn in turns if train_on == "assistant" else turns[-1:]:
            trained[turn] = True
        return ids, trained

    def prompt(self, chat: Chat, tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Return the token ids of a chat, up to where the assistant's next message begins. `tools`:
        functions that it may call, if the template supports them. Raises Refused where it cannot be
        rendered.
        """
        text = self._apply(
            chat, chat.messages, add_generation_prompt=True, tokenize=False, tools=tools
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render_marked(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Render the chat; return the text, and the character spans between the template's {%
        generation %} marks: the assistant's turns.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = self._run_template(
            chat,
            lambda: render_jinja_template(
                [chat.messages],
                chat_template=self.text,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            ),
        )
        return texts[0], spans[0]

    def _render_matched(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Render the chat; return the text, and the character span of each assistant turn, found by
        rendering the chat up to it and up to its end.
        """
        full = self._render(chat, chat.messages)
        numbers = [i for i, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
        return full, [self._span(chat, full, number) for number in numbers]

    def _encode(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, list[slice]]:
        """Return the token ids of the text, and for each span of characters the slice of tokens
        that overlap it; a span without tokens is left out.

        Tokenizers that trim offsets (ByteLevel(trim_offsets=True)) assign the spaces before a word
        to no character, and a token of spaces has an empty range: it is taken to reach from the
        token before it.
        """
        encoded = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        starts, ends = np.array(encoded.offsets, np.int64).reshape(-1, 2).T
        # where the tokens before have reached in the text
        before = np.maximum.accumulate(np.concatenate(([0], ends[:-1])))
        # a token without characters reaches back to the one before
        starts = np.where(starts == ends, np.minimum(before, starts), starts)
        turns = []
        for first, last in spans:
            inside = np.flatnonzero((starts < last) & (ends > first) & (ends > starts))
            if len(inside):
                turns.append(slice(int(inside[0]), int(inside[-1]) + 1))
        return np.array(encoded.ids, np.int64), turns

    def _span(self, chat: Chat, full: str, number: int) -> tuple[int, int]:
        """Return the character span of the assistant's message `number` in the rendered chat
        `full`, its end-of-turn token included. Raises Refused where the template renders earlier
        messages differently once others follow.
        """
        messages = chat.messages
        if number:
            before = self._render(chat, messages[:number], prompt=True)
        else:  # few templates write no messages: what one without words begins with
            empty = self._render(chat, [{**messages[0], "content": ""}])
            before = os.path.commonprefix([full, empty])
        until = self._render(chat, messages[: number + 1])
        # some templates drop the reasoning of earlier turns
        if not (full.startswith(before) and full.startswith(until) and len(before) <= len(until)):
            raise gate.refuse(
                chat.where,
                f"the chat template writes the first {number + 1} messages differently when "
                "others follow, so the tokens of a turn cannot be determined: give "
                "--data.template one with {% generation %} marks, or use --data.masking-strategy "
                "all",
            )
        # what this turn adds: the answer and what ends it
        turn = until[len(before) :]
        bare = turn.rstrip()
        # an end-of-turn token is learned, white space behind it is not
        ends = any(bare.endswith(token) for token in self.tokenizer.all_special_tokens)
        return len(before), len(before) + len(bare if ends else turn)

    def _render(self, chat: Chat, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """Return messages rendered as text; `prompt`: with the beginning of the assistant's next
        turn.
        """
        return self._apply(chat, messages, add_generation_prompt=prompt, tokenize=False)

    def _apply(self, chat: Chat, messages: list[dict[str, Any]], **options: Any) -> Any:
        """Call the tokenizer's apply_chat_template with this template and `options`; return its
        result. Raises Refused, naming the chat, for errors of the template and where it exceeds the
        time limit.
        """
        return self._run_template(
            chat,
            lambda: self.tokenizer.apply_chat_template(
                messages, chat_template=self.text, **options
            ),
        )

    def _run_template(self, chat: Chat, render: Callable[[], Any]) -> Any:
        """Return render(), within the time limit. Raises Refused, naming the chat, for errors of
        the template.
        """
        from jinja2.exceptions import TemplateError

        try:
            with limit_time(self.seconds):
                return render()
        except (
            TemplateError,
            TypeError,
            ValueError,
            KeyError,
            OverflowError,
            TimeLimitExceeded,
        ) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise gate.refuse(
                chat.where, f"the chat template cannot render it: {reason}"
            ) from error


def template_of(tokenizer: PreTrainedTokenizer, name: str | None) -> Template:
    """Return the template that --data.template names (built in, or a file), else the tokenizer's
    own. Raises ValueError where there is none, or the tokenizer is not a fast one.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            "the tokenizer has no tokenizer.json, so the tokens of a turn cannot be determined: "
            "use another --data.tokenizer"
        )
    known = ", ".join(TEMPLATES)
    if name is not None:
        if name in TEMPLATES:
            return Template(tokenizer, TEMPLATES[name])
        if not expand(name).is_file():
            raise ValueError(f"--data.template {name} is neither a file nor one of {known}")
        return Template(tokenizer, gate.read_text(expand(name), TEMPLATE_SIZE))
    return tokenizer_template(
        tokenizer, f"give --data.template a Jinja file, or one of {known}", "use --data.template"
    )


def tokenizer_template(tokenizer: PreTrainedTokenizer, mend: str, choose: str) -> Template:
    """Return the tokenizer's own chat template. Raises ValueError where there is none, or several
    and no default; `mend`, `choose`: what the user should do then, for the message.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer has no chat template: {mend}")
    try:
        return Template(tokenizer, tokenizer.get_chat_template())
    except ValueError as error:  # of several none is the default
        reason = str(error).splitlines()[0]
        raise ValueError(f"the tokenizer's chat template: {reason}; {choose}") from error
