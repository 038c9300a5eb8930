"""What a client is told when its request cannot be served, on every path in one form."""

from __future__ import annotations

from typing import Any

from ramify.errors import (
    DrainingError,
    EngineStoppedError,
    OverloadedError,
    PromptTooLongError,
    RamifyError,
    RequestError,
    UnknownRequestError,
)

# HTTP status → the words of the two APIs for it.
OPENAI_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}
ANTHROPIC_KINDS = OPENAI_KINDS | {
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def _shown(text: str, limit: int) -> str:
    """Text that quotes a client, made so that it can be sent back: UTF-8, and not too long."""
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return text.encode("utf-8", "replace").decode()


class ApiError(RamifyError):
    """An answer that is not 200.

    Args:
        status: of HTTP.
        message: for the client; never holds anything of another tenant or of this machine.
        param: the field that is at fault, as a path: `messages[2].content`.
        code: a word that programs look for.
        retry_after_s: when to try again, for 429 and 503.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        self.status, self.message, self.code = status, _shown(message, 1000), code
        self.param = None if param is None else _shown(param, 200)
        super().__init__(self.message)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to this answer."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def openai(self) -> dict[str, Any]:
        """The body in OpenAI's form."""
        kind = OPENAI_KINDS.get(self.status, "server_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic(self, request_id: str | None = None) -> dict[str, Any]:
        """The body in Anthropic's form."""
        kind = ANTHROPIC_KINDS.get(self.status, "api_error")
        where = f"{self.param}: " if self.param else ""
        error = {"type": kind, "message": where + self.message}
        return {"type": "error", "error": error, "request_id": request_id}


def as_api_error(error: BaseException) -> ApiError:
    """Any failure as an answer: the client's fault is 4xx, ours says nothing of the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError | DrainingError):  # before RequestError, which they are
        wait = max(1, round(error.retry_after_s))
        code = "overloaded" if isinstance(error, OverloadedError) else "draining"
        return ApiError(503, str(error), code=code, retry_after_s=wait)
    if isinstance(error, EngineStoppedError):
        return ApiError(
            503,
            "the engine has stopped; this server has to be started again",
            code="engine_stopped",
        )
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, UnknownRequestError):
        return ApiError(404, str(error))
    if isinstance(error, RequestError):
        name = getattr(error, "name", None)
        return ApiError(400, str(error), param=name if isinstance(name, str) else None)
    return ApiError(500, "the server failed to answer this request; its log says why")
