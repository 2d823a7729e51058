"""What is refused or fails, as clients of OpenAI's interface are told it."""

from http import HTTPStatus
from typing import Any


class Problem(Exception):
    """An answer that is none: a status, and an `error` as OpenAI's."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry: bool | None = None,
    ):
        """`param`: the field that is meant. `retry`: whether to come again may help; None: as the
        status says.
        """
        super().__init__(message)
        self.status, self.param, self.code, self.retry = status, param, code, retry

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's."""
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
        """Besides those of every answer; OpenAI's library obeys `x-should-retry`."""
        found = {}
        if self.status == HTTPStatus.UNAUTHORIZED:
            found["www-authenticate"] = "Bearer"
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            found["retry-after"] = "1"
        if self.retry is not None:
            found["x-should-retry"] = "true" if self.retry else "false"
        return found


def bad(message: str, param: str | None = None, code: str | None = None) -> Problem:
    """A request that cannot be answered, to be raised."""
    return Problem(HTTPStatus.BAD_REQUEST, message, param, code)
