"""OpenAI's interface as data: requests as pydantic models, and errors.

A field that is not known is refused, and so is one that this server would not obey. Fields that
change no completion (`user`, `metadata`, ...) are accepted. `top_k`, `min_p`, `repetition_penalty`
and `min_tokens` are not OpenAI's; other servers have them by these names.
"""

import math
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dolmen.core.messages import cut
from dolmen.files import gate


class Problem(Exception):
    """An error response in OpenAI's format."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry: bool | None = None,
    ):
        """`param`: the field of the request that is wrong. `retry`: whether a client should try
        again; None: as the status says.
        """
        super().__init__(message)
        self.status, self.param, self.code, self.retry = status, param, code, retry

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == HTTPStatus.UNAUTHORIZED:
            kind = "authentication_error"
        elif self.status == HTTPStatus.TOO_MANY_REQUESTS:
            kind = "rate_limit_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers of its own; OpenAI's library obeys `x-should-retry`."""
        found = {}
        if self.status == HTTPStatus.UNAUTHORIZED:
            found["www-authenticate"] = "Bearer"
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            found["retry-after"] = "1"
        if self.retry is not None:
            found["x-should-retry"] = "true" if self.retry else "false"
        return found


def bad(message: str, param: str | None = None, code: str | None = None) -> Problem:
    """Return the error of a request that cannot be answered (400), to be raised."""
    return Problem(HTTPStatus.BAD_REQUEST, message, param, code)


STOPS = 16  # strings
STOP_LENGTH = 1024  # characters of one
BIASED = 1024  # tokens
TOP = 20  # likeliest tokens, told beside each

Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Stop = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]
Count = Annotated[int, Field(ge=1, lt=2**31)]


class Part(BaseModel):
    """A part of a request; a field that is not declared is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Part):
    include_usage: bool = False


class Sampled(Part):
    """Fields of both kinds of requests."""

    model: str
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=BIASED)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # of no effect here
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None

    @property
    def samples(self) -> int:
        """Completions per prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def biases(self) -> dict[int, float]:
        """Token id -> value added to its logit. Raises Problem for a key that is no id."""
        named = self.logit_bias or {}
        for name in named:
            if not (name.isascii() and name.isdigit() and len(name) < 10):
                raise bad(f"logit_bias has {cut(name)!r}, which is no token id", "logit_bias")
        return {int(name): value for name, value in named.items()}

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return 1


class Completion(Sampled):
    """A request to /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(min_length=0)
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=TOP)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def each(self) -> list[str] | list[list[int]]:
        """The prompts. Raises Problem for an empty list."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise bad("prompt is an empty list: give a text, or token ids", "prompt")
        if isinstance(prompt[0], int):
            return [[int(token) for token in prompt if isinstance(token, int)]]
        texts = [one for one in prompt if isinstance(one, str)]
        return texts or [one for one in prompt if isinstance(one, list)]

    @property
    def prompts(self) -> int:
        return len(self.each)


class Named(BaseModel):
    """An object for the chat template; other fields are kept for it."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Text(Named):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class Called(Named):
    name: str
    arguments: str


class ToolCall(Named):
    """A function call of an assistant message."""

    type: Literal["function"] = "function"
    function: Called


class Message(Named):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Text] | None = None
    tool_calls: list[ToolCall] | None = None


class Function(Named):
    name: str


class Tool(Named):
    type: Literal["function"]
    function: Function


class Format(Part):
    type: Literal["text"]


class Chat(Sampled):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: Format | None = None


Asked = TypeVar("Asked", Completion, Chat)


def parsed(body: bytes, cls: type[Asked], kind: gate.Kind) -> Asked:
    """Parse the body of a request. Raises Problem."""
    try:
        values = gate.parse_json(body, "the body", kind)
        _whole_characters(values)
        return cls.model_validate(values)
    except gate.Refused as error:
        raise bad(str(error)) from None
    except ValidationError as error:
        raise _told(error) from None


def _whole_characters(values: Any) -> None:
    """Raises Refused for a lone surrogate, which JSON can hold and no tokenizer takes, and for a
    number beyond 64 bits.
    """
    waiting = [values]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, str) and not _encodes(one):
            raise gate.refuse("the body", "it has half a character (a lone surrogate)")
        elif isinstance(one, int) and not -(2**63) <= one < 2**64:
            raise gate.refuse("the body", "it has an integer of over 64 bits")
        elif isinstance(one, float) and not math.isfinite(one):
            raise gate.refuse("the body", "it has a number beyond 1e308")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _told(error: ValidationError) -> Problem:
    """Return the first validation error, with the field that has it."""
    found = error.errors(include_url=False, include_context=False)
    first = found[0]
    place = [str(one) for one in first["loc"]]
    field = place[0] if place else None
    several = [one for one in found if one["loc"][:1] == first["loc"][:1]]
    if first["type"] == "extra_forbidden":
        return bad(f"{cut('.'.join(place))}: this field is not known here", cut(field or ""))
    said = first["msg"] if len(several) == 1 else f"{first['msg']} (or another form of it)"
    return bad(f"{'.'.join(place)[:200]}: {said}", field)
