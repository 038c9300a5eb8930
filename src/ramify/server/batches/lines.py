"""Lines of a batch: requests as they are read, answers, and results as they are written."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from ramify.errors import RamifyError
from ramify.server.batches.records import LineError, Result
from ramify.server.errors import ApiError
from ramify.server.http.json_limits import check_json_limits

MAX_ID_CHARS = 512
# At which `str.splitlines` ends a line, beside those that JSON escapes.
_LINE_ENDS = "\u0085\u2028\u2029"
Unanswered = Literal["cancelled", "expired"]
_MESSAGES: dict[Unanswered, str] = {
    "cancelled": "This request was not executed because the batch was cancelled.",
    "expired": "This request could not be executed before the completion window expired.",
}


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A request of a batch: its id, and the JSON that its endpoint gets as a body."""

    custom_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What an endpoint has answered to a line.

    `is_aborted`: the server has ended the request; what there is of the answer is no result.
    """

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None
    is_aborted: bool = False


@dataclass(frozen=True, slots=True)
class ResultLine:
    """The result of a line, as it stands in a file of results.

    `is_error`: it goes into the file of errors, where an API has one.
    """

    custom_id: str
    result: Result
    data: bytes  # with the end of the line
    is_error: bool = False


class LineFaultError(RamifyError):
    """A line of an input file that cannot be a request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param

    def at(self, line: int) -> LineError:
        """The error for a batch that has failed.

        Args:
            line: of the file, from 1.
        """
        return LineError(self.code, self.message, line, self.param)


class LineForm(Protocol):
    """The form that an API gives to lines.

    `has_single_model`: all lines of a batch name the same model, which the server has.
    """

    has_single_model: bool

    def read(self, line: bytes) -> LineRequest:
        """The request in a line of the input.

        Raises:
            LineFaultError: it is not one.
        """
        ...

    def answered(self, custom_id: str, answer: LineAnswer) -> ResultLine:
        """The result of a line that has an answer, or an error that its client made."""
        ...

    def unanswered(self, custom_id: str, result: Unanswered) -> ResultLine:
        """The result of a line that was never run."""
        ...

    def result_of(self, line: bytes) -> tuple[str, Result]:
        """The custom id and the result in a line that `answered` or `unanswered` has made.

        Raises:
            msgspec.DecodeError: it is another line, or a part of one.
        """
        ...


class OpenAiLines:
    """OpenAI's: `{"custom_id", "method", "url", "body"}` to `{"id", "custom_id", "response", "error"}`.

    Args:
        endpoint: the path that every line of the batch must have.
    """

    has_single_model = True

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def read(self, line: bytes) -> LineRequest:
        """See LineForm."""
        fields = _object(line)
        custom_id = _text(fields, "custom_id")
        if not 0 < len(custom_id) <= MAX_ID_CHARS:
            raise LineFaultError(
                "invalid_custom_id",
                f"The custom_id has {len(custom_id)} characters; it needs 1 to {MAX_ID_CHARS}.",
                "custom_id",
            )
        if (method := _text(fields, "method")) != "POST":
            raise LineFaultError(
                "invalid_method", f"The method {method[:20]!r} is not POST.", "method"
            )
        if (url := _text(fields, "url")) != self._endpoint:
            raise LineFaultError(
                "url_mismatch",
                f"The URL {url[:100]!r} is not the endpoint of the batch, {self._endpoint}.",
                "url",
            )
        body = bytes(fields.get("body", b""))
        if not body.startswith(b"{"):
            raise (
                _missing("body")
                if not body
                else LineFaultError("invalid_type", "The body is not an object.", "body")
            )
        return LineRequest(custom_id, body)

    def answered(self, custom_id: str, answer: LineAnswer) -> ResultLine:
        """See LineForm."""
        response = {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": msgspec.Raw(answer.body),
        }
        is_error = not 200 <= answer.status < 300
        data = self._line(custom_id, response=response, error=None)
        return ResultLine(custom_id, "errored" if is_error else "succeeded", data, is_error)

    def unanswered(self, custom_id: str, result: Unanswered) -> ResultLine:
        """See LineForm."""
        error = {"code": f"batch_{result}", "message": _MESSAGES[result]}
        data = self._line(custom_id, response=None, error=error)
        return ResultLine(custom_id, result, data, is_error=True)

    def _line(self, custom_id: str, *, response: Any, error: Any) -> bytes:
        name = "batch_req_" + secrets.token_hex(12)
        fields = {"id": name, "custom_id": custom_id, "response": response, "error": error}
        return encoded_line(fields)

    def result_of(self, line: bytes) -> tuple[str, Result]:
        """See LineForm."""
        written = msgspec.json.decode(line, type=_OpenAiResult)
        if written.error is not None:
            is_cancelled = written.error.code == "batch_cancelled"
            return written.custom_id, "cancelled" if is_cancelled else "expired"
        is_success = written.response is not None and 200 <= written.response.status_code < 300
        return written.custom_id, "succeeded" if is_success else "errored"


class _Response(msgspec.Struct):
    status_code: int


class _Error(msgspec.Struct):
    code: str


class _OpenAiResult(msgspec.Struct):
    custom_id: str
    response: _Response | None
    error: _Error | None


def _object(line: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a line.

    Raises:
        LineFaultError: it is not a JSON object, or has too many values.
    """
    try:
        check_json_limits(line, what="This line")
        return msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except ApiError as error:
        raise LineFaultError("invalid_json_line", error.message) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = "This line is not parseable as valid JSON."
        raise LineFaultError("invalid_json_line", message) from None


def _text(fields: dict[str, msgspec.Raw], name: str) -> str:
    """A field that must be a text.

    Raises:
        LineFaultError: it is missing, or no text.
    """
    if name not in fields:
        raise _missing(name)
    try:
        return msgspec.json.decode(fields[name], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = f"The {name} is not a string."
        raise LineFaultError("invalid_type", message, name) from None


def _missing(name: str) -> LineFaultError:
    message = f"Missing required parameter: '{name}'."
    return LineFaultError("missing_required_parameter", message, name)


def is_streamed(body: bytes) -> bool:
    """Whether a request wants its answer as a stream, which a line has no place for."""
    try:
        return msgspec.json.decode(body, type=_Streamed).stream is True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


class _Streamed(msgspec.Struct):
    stream: Any = None


def model_of(body: bytes) -> str | None:
    """The model that a request names; None if it names none."""
    try:
        model = msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return model if isinstance(model, str) else None


class _Named(msgspec.Struct):
    model: Any = None


def encoded_line(fields: Any) -> bytes:
    """A result as a line of JSON that is one line for every reader, with its end."""
    data = msgspec.json.encode(fields)
    for char in _LINE_ENDS:
        data = data.replace(char.encode(), b"\\u%04x" % ord(char))
    return data + b"\n"


def joined(results: Sequence[ResultLine]) -> bytes:
    """The bytes of several results."""
    return b"".join(result.data for result in results)
