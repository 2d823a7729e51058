"""Requests of OpenAI's interface, as pydantic models: fields, types and ranges.

A field that is not known is refused, and one that nothing here would obey too, so that nothing is
asked in vain. Those that change no answer (`user`, `metadata`, ...) are taken. Beside OpenAI's are
`top_k`, `min_p`, `repetition_penalty` and `min_tokens`, which other servers have by these names.
"""

import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dolmen.core.messages import cut
from dolmen.files import gate
from dolmen.serving.http.problem import Problem, bad

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
    """Of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Part):
    include_usage: bool = False


class Sampled(Part):
    """What both requests have."""

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
        """Of each prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def biases(self) -> dict[int, float]:
        """Token id -> what is added to its score. Raises Problem for what is no id."""
        named = self.logit_bias or {}
        for name in named:
            if not (name.isascii() and name.isdigit() and len(name) < 10):
                raise bad(f"logit_bias has {cut(name)!r}, which is no token id", "logit_bias")
        return {int(name): value for name, value in named.items()}

    @property
    def prompts(self) -> int:
        """How many there are."""
        return 1


class Completion(Sampled):
    """Of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(min_length=0)
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=TOP)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def each(self) -> list[str] | list[list[int]]:
        """The prompts. Raises Problem where there is none."""
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
    """What the model's template reads, whatever else it has."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Text(Named):
    """Of a message's content."""

    type: Literal["text"]
    text: str


class Called(Named):
    name: str
    arguments: str


class ToolCall(Named):
    """Of an assistant that has called a function."""

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
    """Of /v1/chat/completions."""

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
    """The request in a body. Raises Problem."""
    try:
        values = gate.parse_json(body, "the body", kind)
        _whole_characters(values)
        return cls.model_validate(values)
    except gate.Refused as error:
        raise bad(str(error)) from None
    except ValidationError as error:
        raise _told(error) from None


def _whole_characters(values: Any) -> None:
    """Raises Refused for half a character: JSON can say one, and no tokenizer takes it."""
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
    """The first of what is wrong, with the field that has it."""
    found = error.errors(include_url=False, include_context=False)
    first = found[0]
    place = [str(one) for one in first["loc"]]
    field = place[0] if place else None
    several = [one for one in found if one["loc"][:1] == first["loc"][:1]]
    if first["type"] == "extra_forbidden":
        return bad(f"{cut('.'.join(place))}: this field is not known here", cut(field or ""))
    said = first["msg"] if len(several) == 1 else f"{first['msg']} (or another form of it)"
    return bad(f"{'.'.join(place)[:200]}: {said}", field)
