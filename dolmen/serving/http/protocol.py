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
from dolmen.serving.request import Temperature


class ApiError(Exception):
    """An error response in OpenAI's format, raised by whoever finds the problem."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry: bool | None = None,
    ):
        """`param`: the field of the request that is wrong. `code`: OpenAI's error code. `retry`:
        whether a client should try again; None: it decides by the status.
        """
        super().__init__(message)
        self.status, self.param, self.code, self.retry = status, param, code, retry

    @property
    def body(self) -> dict[str, Any]:
        """JSON body of the response, with the error type that belongs to the status."""
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
        """Additional headers of the response: www-authenticate for status 401, retry-after for 429,
        and x-should-retry, which OpenAI's client obeys, if `retry` was given.
        """
        headers = {}
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            # seconds; the queue drains as completions finish
            headers["retry-after"] = "1"
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        return headers


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error (status 400) of a request that cannot be answered; the caller raises it."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, code)


MAX_STOPS = 16  # stop strings of a request (OpenAI: 4); each costs a comparison per token
MAX_STOP_LENGTH = 1024  # characters of a stop string
MAX_BIASES = 1024  # tokens of logit_bias
MAX_TOP_LOGPROBS = 20  # as OpenAI

Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Count = Annotated[int, Field(ge=1, lt=2**31)]


class StrictModel(BaseModel):
    """Base of request models: a field that is not declared, a value of another type, NaN and
    infinity are errors.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(StrictModel):
    """Options of a streamed response."""

    include_usage: bool = False


class SamplingRequest(StrictModel):
    """Fields that both kinds of requests have."""

    model: str
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[Temperature, Field(le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # accepted, without an effect on completions
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None

    @property
    def num_samples(self) -> int:
        """Completions per prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` as token id -> value added to its logit. Raises ApiError for a key that is
        no id.
        """
        biases = self.logit_bias or {}
        for name in biases:
            # 9 digits: int() of thousands would take long
            if not (name.isascii() and name.isdigit() and len(name) < 10):
                raise bad_request(
                    f"logit_bias has {cut(name)!r}, which is not a token id", "logit_bias"
                )
        return {int(name): value for name, value in biases.items()}

    @property
    def num_prompts(self) -> int:
        """Number of prompts of the request; a chat is one."""
        return 1


class CompletionRequest(SamplingRequest):
    """A request to /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(min_length=0)
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompt_list(self) -> list[str] | list[list[int]]:
        """The prompts as a list of texts or of token id lists, from any of the four forms. Raises
        ApiError for an empty list.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise bad_request("prompt is an empty list: give a text, or token ids", "prompt")
        if isinstance(prompt[0], int):
            # pydantic has checked that all are ids; the test is for pyright
            return [[int(token) for token in prompt if isinstance(token, int)]]
        # a list has one kind of entries
        texts = [text for text in prompt if isinstance(text, str)]
        return texts or [tokens for tokens in prompt if isinstance(tokens, list)]

    @property
    def num_prompts(self) -> int:
        """Number of prompts of the request. Raises ApiError for an empty list."""
        return len(self.prompt_list)


class TemplateObject(BaseModel):
    """Base of objects for the chat template: fields that are not declared are kept."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class TextPart(TemplateObject):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(TemplateObject):
    """Name and JSON arguments of a function call."""

    name: str
    arguments: str


class ToolCall(TemplateObject):
    """A function call of an assistant message."""

    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(TemplateObject):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None


class FunctionDefinition(TemplateObject):
    """A function that the model may call; only the name is checked."""

    name: str


class Tool(TemplateObject):
    """A tool of a chat request, for its template."""

    type: Literal["function"]
    function: FunctionDefinition


class ResponseFormat(StrictModel):
    """Format of the response; only text is supported."""

    type: Literal["text"]


class ChatCompletionRequest(SamplingRequest):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None


RequestBody = TypeVar("RequestBody", CompletionRequest, ChatCompletionRequest)


def parse_body(body: bytes, cls: type[RequestBody], kind: gate.Kind) -> RequestBody:
    """Parse the JSON body of a request to the model `cls`, within the limits of `kind`. Raises
    ApiError (400), which names the field.
    """
    try:
        # bounds size, depth and repeated names before pydantic sees them
        values = gate.parse_json(body, "the body", kind)
        _check_values(values)
        return cls.model_validate(values)
    except gate.Refused as error:
        raise bad_request(str(error)) from None
    except ValidationError as error:
        raise _validation_error(error) from None


def _check_values(values: Any) -> None:
    """Raise Refused for a lone surrogate, which JSON can hold and no tokenizer takes, and for a
    number beyond 64 bits or 1e308. Iterative: a body may be nested deeper than Python's stack.
    """
    remaining = [values]
    while remaining:
        node = remaining.pop()
        if isinstance(node, dict):
            remaining += [*node, *node.values()]
        elif isinstance(node, list):
            remaining += node
        elif isinstance(node, str) and not _is_unicode(node):
            raise gate.refuse("the body", "it has a lone surrogate, which is not valid text")
        elif isinstance(node, int) and not -(2**63) <= node < 2**64:
            raise gate.refuse("the body", "it has an integer of over 64 bits")
        elif isinstance(node, float) and not math.isfinite(node):
            raise gate.refuse("the body", "it has a number beyond 1e308")


def _is_unicode(text: str) -> bool:
    """Return whether a string can be encoded as UTF-8: it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _validation_error(error: ValidationError) -> ApiError:
    """Return the response (400) for the first validation error, which names its field."""
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    place = [str(part) for part in first["loc"]]
    field = place[0] if place else None
    # pydantic reports an error per member of a union
    same_field = [error for error in errors if error["loc"][:1] == first["loc"][:1]]
    if first["type"] == "extra_forbidden":
        return bad_request(f"{cut('.'.join(place))}: this field is not supported", cut(field or ""))
    message = first["msg"] if len(same_field) == 1 else f"{first['msg']} (or another form of it)"
    return bad_request(f"{'.'.join(place)[:200]}: {message}", field)
