"""Turns a request of a client into requests of the engine: tokens, sampling options, lengths.

    body -> tokens of each prompt (the chat template, or the tokenizer) -> engine requests, checked

An option that a request leaves open is as generation_config.json has it, or else as OpenAI's
interface does: temperature 1, and 16 new tokens of a completion. A chat may fill the context.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dolmen.conversion.source import ModelSource
from dolmen.core.messages import plural
from dolmen.data.template import Chat, Template
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.files import gate, kinds
from dolmen.serving.config import ServeConfig
from dolmen.serving.generation import SAMPLING_ONLY, encode
from dolmen.serving.http.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    SamplingRequest,
    bad_request,
)
from dolmen.serving.request import Request, SamplingParams, check, span_of

NEW_TOKENS = 16  # default max_tokens of a completion, as OpenAI


@dataclass(frozen=True)
class ParsedRequest:
    """A client's request as the engine takes it: one engine request per prompt."""

    requests: Sequence[Request]
    stop: tuple[str, ...]
    top: int | None
    """Top log-probabilities sent per token; None: no log-probabilities."""
    echo: bool
    """The prompt is sent before the completion."""

    def for_adapter(self, adapter: str | None) -> "ParsedRequest":
        """Return a copy whose engine requests name a LoRA adapter; None: the base model."""
        requests = [replace(request, adapter=adapter) for request in self.requests]
        return replace(self, requests=requests)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(request.tokens) for request in self.requests)


@dataclass(frozen=True, eq=False)
class RequestParser:
    """Converts clients' requests to one model into requests of its engine."""

    config: ServeConfig
    source: ModelSource
    tokenizer: PreTrainedTokenizer
    template: Template | None
    """Chat template; None: the model has none."""
    defaults: SamplingParams
    """Sampling options of requests that leave them open."""
    new_tokens: int | None
    """Default of max_tokens; None: 16 for completions, all that fit for chats."""

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its completion together: by --max-length, positions, and the
        KV cache. The last one is not read, so it needs no position. Raises ValueError for a
        --max-length that the model does not have.
        """
        spec, limits = self.source.model.spec, self.config.limits
        longest, requested = spec.max_position_embeddings + 1, self.config.max_length
        if requested is not None and requested > longest and spec.longest is not None:
            raise ValueError(
                f"--max-length is {requested:,}, and max_position_embeddings {longest - 1:,}: use "
                f"at most {longest:,}"
            )
        # without a learned embedding a model may read beyond its training length
        longest = requested or longest
        return longest if limits.pages is None else min(longest, limits.pages * limits.page + 1)

    def parse_completion(self, body: CompletionRequest) -> ParsedRequest:
        """Tokenize and check a request to /v1/completions. Raises ApiError (400), also for options
        that are not supported (suffix, best_of).
        """
        if body.suffix:
            raise bad_request(
                "suffix is not supported: models here only continue the text before a completion",
                "suffix",
            )
        if body.best_of not in (None, body.num_samples):
            raise bad_request("best_of is not supported: set n only", "best_of")
        if body.echo and body.logprobs is not None and (body.stream or body.stops):
            # log-probabilities of the prompt arrive with the end of its completion
            raise bad_request("echo with logprobs cannot be combined with stream or stop", "echo")
        new_tokens = body.max_tokens
        if new_tokens is None:
            new_tokens = self.new_tokens or NEW_TOKENS
        prompts = [self._encode(prompt) for prompt in body.prompt_list]
        fixed = body.max_tokens is not None
        return self._build(body, prompts, new_tokens, fixed, body.logprobs, bool(body.echo))

    def parse_chat(self, body: ChatCompletionRequest) -> ParsedRequest:
        """Apply the chat template to a request to /v1/chat/completions, and check it. Raises
        ApiError (400), also for tools that the template does not have.
        """
        if self.template is None:
            raise bad_request(
                "the model has no chat template: ask /v1/completions", code="no_chat_template"
            )
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        limits = [
            limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None
        ]
        # the older and the newer name of one field
        if len(set(limits)) > 1:
            raise bad_request(
                "max_tokens and max_completion_tokens differ: set one of them", "max_tokens"
            )
        tools = None
        if body.tools and body.tool_choice != "none":
            # a template that does not mention them would drop them silently
            if "tools" not in self.template.text:
                raise bad_request("the model's chat template does not support tools", "tools")
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        messages = [_message(number, message) for number, message in enumerate(body.messages)]
        try:
            tokens = self.template.prompt(Chat(messages, 1.0, "messages"), tools)
        except gate.Refused as error:
            raise bad_request(str(error), "messages") from None
        new_tokens = limits[0] if limits else self.new_tokens or self.max_length
        top = (body.top_logprobs or 0) if body.logprobs else None
        return self._build(body, [tokens], new_tokens, bool(limits), top, False)

    def _encode(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt; ids are returned as they are. Raises ApiError (400) for
        a text that cannot be encoded.
        """
        if not isinstance(prompt, str):
            return prompt
        try:
            return encode(self.tokenizer, prompt, self.source.model)
        except ValueError as error:
            raise bad_request(str(error).replace("--prompt", "prompt"), "prompt") from None

    def _build(
        self,
        body: SamplingRequest,
        prompts: list[list[int]],
        new_tokens: int,
        fixed: bool,
        top: int | None,
        echo: bool,
    ) -> ParsedRequest:
        """Return the engine's requests, one per prompt, checked.

        `new_tokens`: most new tokens. `fixed`: the client has set it, so it must fit the context;
        else it is lowered. `top`: top log-probabilities per token; None: none. `echo`: the prompt
        is sent too. Raises ApiError (400).
        """
        # without a seed each request is random; with one it is reproducible
        seed = secrets.randbits(63) if body.seed is None else body.seed
        requests = []
        for number, tokens in enumerate(prompts):
            # a default is shortened to the context, a limit of the client is not
            available = self._available_tokens(tokens, new_tokens if fixed else 1)
            request = Request(
                tokens,
                self._sampling_params(body, min(new_tokens, available)),
                # with `seed`, random numbers follow from the prompt's place in its request
                id=number,
                seed=seed,
                samples=body.num_samples,
                logprobs=None if top is None else "raw",
                top=top or 0,
                prompt_logprobs=echo and top is not None,
            )
            self._check(request)
            requests.append(request)
        return ParsedRequest(requests, body.stops, top, echo)

    def _available_tokens(self, tokens: list[int], needed: int) -> int:
        """Return how many new tokens fit the context behind a prompt. Raises ApiError (400) if they
        are fewer than `needed`, or none.
        """
        available = self.max_length - len(tokens)
        if available < max(needed, 1):
            raise bad_request(
                f"the prompt has {plural(len(tokens), 'token')} and {needed:,} may follow, which "
                f"exceeds the maximum of {self.max_length:,} for both together",
                code="context_length_exceeded",
            )
        return available

    def _sampling_params(self, body: SamplingRequest, new_tokens: int) -> SamplingParams:
        """Return the sampling parameters of a request; what it leaves open has the model's
        defaults. Raises ApiError (400) if min_tokens exceeds `new_tokens`.
        """
        fields = {
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
            "min_p": body.min_p,
            "repetition_penalty": body.repetition_penalty,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "min_new_tokens": body.min_tokens,
        }
        specified: dict[str, Any] = {
            name: value for name, value in fields.items() if value is not None
        }
        if body.top_k in (-1, 0):  # how vLLM and llama.cpp switch it off
            specified["top_k"] = None
        params = replace(
            self.defaults, **specified, logit_bias=body.biases, max_new_tokens=new_tokens
        )
        if body.min_tokens is None:
            params = replace(params, min_new_tokens=min(params.min_new_tokens, new_tokens))
        elif body.min_tokens > new_tokens:
            raise bad_request(
                f"min_tokens ({body.min_tokens}) exceeds the most new tokens, {new_tokens}",
                "min_tokens",
            )
        if params.temperature == 0:
            # the defaults' filters would be errors for a greedy request
            params = replace(params, **dict.fromkeys(SAMPLING_ONLY))
        return params

    def _check(self, request: Request) -> None:
        """Check an engine request against the model and the limits. Raises ApiError (400)."""
        try:
            spec = self.source.model.spec
            check(spec, request, self.config.limits)
            span_of(spec, request.tokens)
        except ValueError as error:
            raise bad_request(str(error)) from None


def _message(number: int, message: ChatMessage) -> dict[str, Any]:
    """Return a message as the chat template takes it: content as one text, arguments of calls
    parsed, role developer as system. Raises ApiError (400).
    """
    values = message.model_dump(exclude_none=True)
    content = message.content
    if content is None and message.role != "assistant":
        raise bad_request(f"messages.{number}.content is missing", "messages")
    if content is not None and not isinstance(content, str):
        # templates expect a string
        content = "".join(part.text for part in content)
    values["content"] = content or ""
    if message.role == "developer":  # OpenAI's newer name of the system role
        values["role"] = "system"
    for call in values.get("tool_calls", ()):
        where = f"messages.{number}.tool_calls: arguments"
        try:
            call["function"]["arguments"] = gate.parse_json(
                call["function"]["arguments"].encode(), where, kinds.ARGUMENTS
            )
        except gate.Refused as error:
            raise bad_request(str(error), "messages") from None
    return values
