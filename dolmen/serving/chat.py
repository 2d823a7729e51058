"""A chat with a model in a terminal: the messages, and completions as they are generated.

    chat = ChatSession(source, tokenizer, config)
    with chat.engine(mesh):
        for text in chat.reply("Which is the highest mountain?"):
            print(text, end="")

The model reads the whole chat for each reply. An interrupted reply (`stop`) stays in the chat as
far as it was shown.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from dolmen.conversion.source import ModelSource
from dolmen.core.mesh import Mesh
from dolmen.core.messages import plural
from dolmen.data import template
from dolmen.data.template import tokenizer_template
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.serving import engine
from dolmen.serving.config import ChatConfig
from dolmen.serving.generation import Detokenizer
from dolmen.serving.request import Request


class ChatSession:
    """The messages of a chat, and the engine that generates the replies."""

    def __init__(self, source: ModelSource, tokenizer: PreTrainedTokenizer, config: ChatConfig):
        """`config`: options with the defaults of generation_config.json filled in. Raises
        ValueError for a model without a chat template.
        """
        self.source, self.tokenizer, self.config = source, tokenizer, config
        self.template = tokenizer_template(
            tokenizer,
            "it is not a chat model; `dolmen generate --prompt` continues text",
            "give a model with one",
        )
        self.messages: list[dict[str, Any]] = []
        self.stopped = False
        self.truncated = False
        """Whether the last reply reached --max-new-tokens."""
        self._replies = count()
        self.reset()

    def reset(self) -> None:
        """Remove all messages but the system prompt."""
        self.messages = []
        if self.config.system is not None:
            self.messages.append({"role": "system", "content": self.config.system})

    def undo(self) -> str | None:
        """Remove the last user message and its reply; return the message's text, or None (nothing
        removed) if there is no reply yet.
        """
        if not self.messages or self.messages[-1]["role"] != template.ASSISTANT:
            return None
        *self.messages, message, _ = self.messages
        return message["content"]

    def stop(self) -> None:
        """Interrupt the reply at its next token (from a signal handler)."""
        self.stopped = True

    @contextmanager
    def engine(self, mesh: Mesh, draft: ModelSource | None = None) -> Iterator[None]:
        """Load the model, and the `draft` model of speculative decoding, on `mesh`; `reply` can be
        called within this context.
        """
        with engine.open_engine(
            self.config, self.source, self.tokenizer, mesh, draft=draft
        ) as self._engine:
            yield

    def reply(self, text: str) -> Iterator[str]:
        """Yield the reply to the user's `text`, piece by piece, and append both to the messages.

        An interrupted reply stays as far as it was generated. Afterwards `truncated` is True if it
        reached --max-new-tokens. Raises ValueError, with the messages as before, for a chat that
        the model cannot read.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        request = self._request(messages)
        # raises before the chat is changed
        number, written = self._engine.add(request), Detokenizer(self.tokenizer, self.config.stop)
        self.messages, self.stopped, self.truncated = messages, False, False
        try:
            while self._engine.busy:
                output = self._engine.step()
                for new in output.new_tokens:
                    yield written.add(new.token)
                engine.require_finite(output.finished)
                # a stop string in the last token counts as stopped
                at_limit = any(sequence.finish_reason == "length" for sequence in output.finished)
                self.truncated = at_limit and written.stopped is None
                if self.stopped or written.stopped is not None:
                    break
            yield written.end()
        finally:
            # frees the pages; without effect if the sequence has finished
            self._engine.cancel(number)
            self.messages.append({"role": template.ASSISTANT, "content": written.whole})

    def _request(self, messages: list[dict[str, Any]]) -> Request:
        """Return the engine request for the next reply to `messages`. Raises ValueError if the chat
        and --max-new-tokens exceed the model's positions.
        """
        tokens = self.template.prompt(template.Chat(messages, 1.0, "the chat"))
        params, spec = self.config.sampling_params, self.source.model.spec
        # the last new token is not read, so it needs no position
        room = spec.max_position_embeddings - len(tokens) + 1
        if room < params.max_new_tokens:
            raise ValueError(
                f"the chat has {plural(len(tokens), 'token')} and a reply up to "
                f"{params.max_new_tokens:,}, but max_position_embeddings is "
                f"{spec.max_position_embeddings:,}: start again with /reset, or use a smaller "
                "--max-new-tokens"
            )
        # a new id each: the same question again may be answered differently
        return Request(tokens, params, id=next(self._replies), seed=self.config.seed)
