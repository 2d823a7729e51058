"""A chat with a model: messages so far, and answers as they are written, by the engine that answers
files.

    chat = Chat(source, tokenizer, config)
    with chat.engine():
        for text in chat.answer("Which is the highest mountain?"):
            print(text, end="")

The whole chat is what the model reads for each answer. One that is ended early (`stop`) stays in
the chat as far as it was shown.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from dolmen.conversion.source import Source
from dolmen.core.mesh import Mesh
from dolmen.core.messages import counted
from dolmen.data import chats
from dolmen.data.template import own_template
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.optim.optimizer import DTYPES
from dolmen.serving import engine
from dolmen.serving.config import ChatConfig
from dolmen.serving.engine import Engine
from dolmen.serving.request import Request
from dolmen.serving.text import Incremental


class Chat:
    """With a model of chats."""

    def __init__(self, source: Source, tokenizer: PreTrainedTokenizer, config: ChatConfig):
        """`config` with what generation_config.json says. Raises ValueError for a model that has no
        chat template.
        """
        self.source, self.tokenizer, self.config = source, tokenizer, config
        self.template = own_template(
            tokenizer,
            "it is not made for chats; `dolmen generate --prompt` continues a text",
            "give a model with one",
        )
        self.messages: list[dict[str, Any]] = []
        self.stopped = False
        self.truncated = False
        """Whether the last answer has ended at --max-new-tokens, not by itself."""
        self._answers = count()
        self.reset()

    def reset(self) -> None:
        """The chat begins anew."""
        self.messages = []
        if self.config.system is not None:
            self.messages.append({"role": "system", "content": self.config.system})

    def take_back(self) -> str | None:
        """The last message that was answered, with its answer; None where there is none."""
        if not self.messages or self.messages[-1]["role"] != chats.ASSISTANT:
            return None
        *self.messages, said, _ = self.messages
        return said["content"]

    def stop(self) -> None:
        """The answer that is being written ends with its next token."""
        self.stopped = True

    @contextmanager
    def engine(self, mesh: Mesh) -> Iterator[None]:
        """Within, the model answers."""
        dtype = DTYPES[self.config.dtype] if self.config.dtype else None
        weights = self.config.weights
        model = engine.load_placed(self.source, mesh, dtype, weights)
        ends, known = engine.stop_tokens(self.source), self.tokenizer.get_vocab().values()
        with Engine(model, stop=ends, known=known, mesh=mesh, weights=weights) as self._engine:
            yield

    def answer(self, text: str) -> Iterator[str]:
        """The answer to `text`, in the parts in which it becomes certain. Raises ValueError, and
        the chat is as it was before, for a chat that the model cannot read.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        request = self._request(messages)
        number, written = self._engine.add(request), Incremental(self.tokenizer, self.config.stop)
        self.messages, self.stopped, self.truncated = messages, False, False
        try:
            while self._engine.busy:
                happened = self._engine.step()
                for chosen in happened.chosen:
                    yield written.add(chosen.token)
                engine.require_finite(happened.ended)
                at_limit = any(one.why == "length" for one in happened.ended)
                self.truncated = at_limit and written.stopped is None
                if self.stopped or written.stopped is not None:
                    break
            yield written.end()
        finally:
            self._engine.cancel(number)
            self.messages.append({"role": chats.ASSISTANT, "content": written.whole})

    def _request(self, messages: list[dict[str, Any]]) -> Request:
        tokens = self.template.prompt(chats.Chat(messages, 1.0, "the chat"))
        options, tree = self.config.of_tokens, self.source.model.tree
        room = tree.max_position_embeddings - len(tokens) + 1
        if room < options.max_new_tokens:
            raise ValueError(
                f"the chat has {counted(len(tokens), 'token')} and an answer may have "
                f"{options.max_new_tokens:,}, max_position_embeddings is "
                f"{tree.max_position_embeddings:,}: begin anew with /reset, or use a smaller "
                "--max-new-tokens"
            )
        return Request(tokens, options, id=next(self._answers), seed=self.config.seed)
