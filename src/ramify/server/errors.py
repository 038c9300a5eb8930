"""`ApiError`: an error response, and the HTTP status of each exception of the engine."""

from __future__ import annotations

import re
from typing import Any

from ramify.errors import (
    DrainingError,
    EngineStoppedError,
    NoReplicaError,
    OutOfPagesError,
    OverloadedError,
    PromptTooLongError,
    RamifyError,
    RankLostError,
    ReplicaLostError,
    RequestError,
    RequestTooLargeError,
    UnknownRequestError,
    shortened,
)

RESTART_S = 30  # `Retry-After` of a server that has to be started again
PINNED_S = 30  # `Retry-After` while pins hold the pages of a request

# HTTP status → `error.type` of OpenAI's and Anthropic's APIs.
OPENAI_ERROR_TYPES = {
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
ANTHROPIC_ERROR_TYPES = OPENAI_ERROR_TYPES | {
    413: "request_too_large",
    500: "api_error",
}


def _sendable(text: str, limit: int) -> str:
    """Cut text that quotes a client to `limit` characters, and replace lone surrogates."""
    return shortened(text, limit).encode("utf-8", "replace").decode()


def _begins_with(message: str, field: str) -> bool:
    """Whether a message begins with a field: `n is …`, `the model …`."""
    return re.match(rf"(the )?{re.escape(field)}(?![\w.\[])", message) is not None


class ApiError(RamifyError):
    """An error response: HTTP status and body in the form of each API.

    Args:
        status: of HTTP.
        message: for the client; never holds anything of another tenant or of this machine.
        param: path of the wrong field: `messages[2].content`.
        code: machine-readable reason: `context_length_exceeded`.
        retry_after_s: the `Retry-After` header, for 429 and 503.
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
        self.status, self.message, self.code = status, _sendable(message, 1000), code
        self.param = None if param is None else _sendable(param, 200)
        super().__init__(self.message)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """`Retry-After` and `WWW-Authenticate`, where they apply."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def openai(self) -> dict[str, Any]:
        """The body in OpenAI's form."""
        is_named = not self.param or _begins_with(self.message, self.param)
        return {
            "error": {
                "message": self.message if is_named else f"{self.param}: {self.message}",
                "type": OPENAI_ERROR_TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic(self, request_id: str | None = None) -> dict[str, Any]:
        """The body in Anthropic's form."""
        error_type = ANTHROPIC_ERROR_TYPES.get(self.status, "api_error")
        prefix = f"{self.param}: " if self.param else ""
        error = {"type": error_type, "message": prefix + self.message}
        return {"type": "error", "error": error, "request_id": request_id}

    def ollama(self) -> dict[str, Any]:
        """The body in Ollama's form."""
        return {"error": f"{self.param}: {self.message}" if self.param else self.message}


class ContextLengthError(ApiError):
    """A prompt that the context cannot hold, in the words by which clients know to compact it.

    Args:
        num_tokens: of the prompt.
        limit: of the context, prompt and answer together.
        note: what else to say, such as how `num_tokens` was estimated.
    """

    def __init__(self, num_tokens: int, limit: int, *, param: str, note: str = "") -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_tokens + 1} tokens ({num_tokens} tokens of prompt, at least 1 of answer); "
            f"shorten the prompt by {num_tokens + 1 - limit}{note}",
            param=param,
            code="context_length_exceeded",
        )
        self._anthropic_message = f"prompt is too long: {num_tokens} tokens > {limit - 1} maximum"
        self._anthropic_message += note

    def openai(self) -> dict[str, Any]:
        """The body in OpenAI's form; its message alone, because clients compare how it begins."""
        body = super().openai()
        body["error"]["message"] = self.message
        return body

    def anthropic(self, request_id: str | None = None) -> dict[str, Any]:
        """The body in Anthropic's form."""
        return ApiError(400, self._anthropic_message).anthropic(request_id)


def as_api_error(error: BaseException) -> ApiError:
    """The error response for any exception: 4xx for the client's, 500 and 503 for the server's.

    A 500 does not quote the exception, nor do errors of a cluster: they name replicas, by address.
    """
    if isinstance(error, ApiError):
        return error
    # A subclass of RequestError: before it. Its text has counts; this one has none.
    if isinstance(error, OverloadedError):
        wait_s = max(1, round(error.retry_after_s))
        message = f"too many requests wait here; try again in {wait_s} s"
        return ApiError(503, message, code="overloaded", retry_after_s=wait_s)
    if isinstance(error, OutOfPagesError):
        message = f"there is no room for this request now; shorten it, or try again in {PINNED_S} s"
        return ApiError(503, message, code="no_room", retry_after_s=PINNED_S)
    if isinstance(error, DrainingError):
        wait_s = max(1, round(error.retry_after_s))
        return ApiError(503, str(error), code="draining", retry_after_s=wait_s)
    if isinstance(error, NoReplicaError):
        wait_s = max(1, round(error.retry_after_s))
        message = f"no engine can take this request now; try again in {wait_s} s"
        return ApiError(503, message, code="no_replica", retry_after_s=wait_s)
    if isinstance(error, ReplicaLostError):
        message = "the engine that computed this answer has gone, and no other can go on with it"
        return ApiError(
            503, f"{message}; send the request again", code="replica_lost", retry_after_s=1
        )
    if isinstance(error, EngineStoppedError):
        return ApiError(
            503,
            "the engine has stopped; this server has to be started again",
            code="engine_stopped",
            # What has ended the engine was not the request.
            retry_after_s=RESTART_S if isinstance(error, RankLostError) else None,
        )
    if isinstance(error, PromptTooLongError):
        return ContextLengthError(error.num_tokens, error.limit, param="messages")
    if isinstance(error, RequestTooLargeError) and error.room <= 0:
        pool = error.num_prompt + error.room
        return ContextLengthError(error.num_prompt, pool, param="messages")
    if isinstance(error, UnknownRequestError):
        return ApiError(404, str(error))
    if isinstance(error, RequestError):
        name = getattr(error, "name", None)
        return ApiError(400, str(error), param=name if isinstance(name, str) else None)
    return ApiError(500, "the server failed to answer this request; its log says why")
