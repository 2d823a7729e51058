"""Turns a request of a client into requests of the engine: tokens, sampling options, lengths.

    body -> tokens of each prompt (the chat template, or the tokenizer) -> engine requests, checked

An option that a request leaves open is as generation_config.json has it, or else as OpenAI's
interface does: temperature 1, and 16 new tokens of a completion. A chat may fill the context.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dolmen.conversion.source import Source
from dolmen.core.messages import plural
from dolmen.data import chats
from dolmen.data.template import Template
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.files import gate, kinds
from dolmen.serving.generation import encode
from dolmen.serving.http.config import ServeConfig
from dolmen.serving.http.protocol import Chat, Completion, Message, Sampled, bad
from dolmen.serving.request import Request, check, span_of
from dolmen.serving.sampling_params import SamplingParams

NEW_TOKENS = 16  # of a completion, where nothing is said, as OpenAI's
DRAWS = ("top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Asked:
    """A client's request as the engine takes it: one engine request per prompt."""

    requests: Sequence[Request]
    stop: tuple[str, ...]
    top: int | None
    """Top log-probabilities sent per token; None: no log-probabilities."""
    echo: bool
    """Whether the prompt is sent before the completion."""

    def by(self, adapter: str | None) -> "Asked":
        """Return the same request to an adapter of the model; None: to the base model."""
        own = [replace(request, adapter=adapter) for request in self.requests]
        return replace(self, requests=own)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.tokens) for request in self.requests)


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads requests to one model."""

    config: ServeConfig
    source: Source
    tokenizer: PreTrainedTokenizer
    template: Template | None
    """Chat template; None: the model has none."""
    defaults: SamplingParams
    """Sampling options of requests that leave them open."""
    new_tokens: int | None
    """Most new tokens of such requests; None: OpenAI's default."""

    @property
    def most(self) -> int:
        """Tokens of a prompt and its answer; the last of these is not read. Raises ValueError for a
        --max-length that the model does not have.
        """
        tree, limits = self.source.model.tree, self.config.limits
        most, asked = tree.max_position_embeddings + 1, self.config.max_length
        if asked is not None and asked > most and tree.longest is not None:
            raise ValueError(
                f"--max-length is {asked:,}, and max_position_embeddings {most - 1:,}: use at most "
                f"{most:,}"
            )
        most = asked or most
        return most if limits.pages is None else min(most, limits.pages * limits.page + 1)

    def completion(self, body: Completion) -> Asked:
        """Raises Problem."""
        if body.suffix:
            raise bad(
                "suffix is what follows the text to be written, and models here write on from "
                "what is before it: leave it out",
                "suffix",
            )
        if body.best_of not in (None, body.samples):
            raise bad("best_of is not done here: give n alone", "best_of")
        if body.echo and body.logprobs is not None and (body.stream or body.stops):
            # those of the prompt come with the end of the answer
            raise bad("echo with logprobs takes neither stream nor stop", "echo")
        most, fixed = body.max_tokens, body.max_tokens is not None
        if most is None:
            most = self.new_tokens or NEW_TOKENS
        every = [self._begin(prompt) for prompt in body.each]
        return self._asked(body, every, most, fixed, body.logprobs, bool(body.echo))

    def chat(self, body: Chat) -> Asked:
        """Raises Problem."""
        if self.template is None:
            raise bad(
                "the model has no chat template: ask /v1/completions", code="no_chat_template"
            )
        if body.top_logprobs is not None and not body.logprobs:
            raise bad("top_logprobs is of logprobs: true", "top_logprobs")
        said = [one for one in (body.max_tokens, body.max_completion_tokens) if one is not None]
        if len(set(said)) > 1:
            raise bad("max_tokens and max_completion_tokens differ: give one", "max_tokens")
        tools = None
        if body.tools and body.tool_choice != "none":
            if "tools" not in self.template.text:
                raise bad("the model's chat template knows no tools", "tools")
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        messages = [_message(number, one) for number, one in enumerate(body.messages)]
        try:
            tokens = self.template.prompt(chats.Chat(messages, 1.0, "messages"), tools)
        except gate.Refused as error:
            raise bad(str(error), "messages") from None
        most = said[0] if said else self.new_tokens or self.most
        top = (body.top_logprobs or 0) if body.logprobs else None
        return self._asked(body, [tokens], most, bool(said), top, False)

    def _begin(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        try:
            return encode(self.tokenizer, prompt, self.source.model)
        except ValueError as error:
            raise bad(str(error).replace("--prompt", "prompt"), "prompt") from None

    def _asked(
        self,
        body: Sampled,
        prompts: list[list[int]],
        most: int,
        fixed: bool,
        top: int | None,
        echo: bool,
    ) -> Asked:
        """`fixed`: the client has said how many new tokens there are to be at most."""
        seed = secrets.randbits(63) if body.seed is None else body.seed
        requests = []
        for number, tokens in enumerate(prompts):
            room = self._room(tokens, most if fixed else 1)
            request = Request(
                tokens,
                self._options(body, min(most, room)),
                id=number,
                seed=seed,
                samples=body.samples,
                logprobs=None if top is None else "raw",
                top=top or 0,
                prompt_logprobs=echo and top is not None,
            )
            self._check(request)
            requests.append(request)
        return Asked(requests, body.stops, top, echo)

    def _room(self, tokens: list[int], wanted: int) -> int:
        """New tokens that may follow. Raises Problem where fewer may than are wanted."""
        room = self.most - len(tokens)
        if room < max(wanted, 1):
            raise bad(
                f"the prompt has {plural(len(tokens), 'token')} and {wanted:,} may follow, which "
                f"is more than {self.most:,}, the most together",
                code="context_length_exceeded",
            )
        return room

    def _options(self, body: Sampled, most: int) -> SamplingParams:
        said = {
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
            "min_p": body.min_p,
            "repetition_penalty": body.repetition_penalty,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "min_new_tokens": body.min_tokens,
        }
        known: dict[str, Any] = {name: one for name, one in said.items() if one is not None}
        options = replace(self.defaults, **known, logit_bias=body.biases, max_new_tokens=most)
        if body.min_tokens is None:
            options = replace(options, min_new_tokens=min(options.min_new_tokens, most))
        elif body.min_tokens > most:
            raise bad(f"min_tokens is {body.min_tokens}, at most {most} may follow", "min_tokens")
        if options.top_k in (-1, 0):  # as other servers say none
            options = replace(options, top_k=None)
        if options.temperature == 0:
            options = replace(options, **dict.fromkeys(DRAWS))
        return options

    def _check(self, request: Request) -> None:
        try:
            tree = self.source.model.tree
            check(tree, request, self.config.limits)
            span_of(tree, request.tokens)
        except ValueError as error:
            raise bad(str(error)) from None


def _message(number: int, message: Message) -> dict[str, Any]:
    """As chat templates take it: text alone, and the arguments of calls as objects."""
    said = message.model_dump(exclude_none=True)
    content = message.content
    if content is None and message.role != "assistant":
        raise bad(f"messages.{number}.content is missing", "messages")
    if content is not None and not isinstance(content, str):
        content = "".join(part.text for part in content)
    said["content"] = content or ""
    if message.role == "developer":  # OpenAI's newer word
        said["role"] = "system"
    for call in said.get("tool_calls", ()):
        where = f"messages.{number}.tool_calls: arguments"
        try:
            call["function"]["arguments"] = gate.parse_json(
                call["function"]["arguments"].encode(), where, kinds.ARGUMENTS
            )
        except gate.Refused as error:
            raise bad(str(error), "messages") from None
    return said
