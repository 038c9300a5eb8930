"""A request and its response as gateways and tracers store them, with what stands beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ramify.analysis.reader import BadRowError, ReadQuality, Row, RowReader
from ramify.analysis.readers.bodies.body_fields import text_or_none
from ramify.analysis.readers.bodies.request_bodies import (
    is_failed_status,
    parse_bodies,
    requests_of,
)
from ramify.analysis.readers.bodies.responses import ResponseFields, parse_response
from ramify.analysis.readers.bodies.segments import settings_of
from ramify.analysis.readers.nested_json import decode_nested, is_cut_json
from ramify.analysis.readers.row_fields import is_redacted, merge_usage
from ramify.analysis.readers.times import Times
from ramify.analysis.records import LoggedRequest, Usage

FAILED = "failed attempt"
OWN_CACHE = "answered by the gateway's response cache"
NO_REQUEST = "no LLM request"
NO_PROMPT = "prompt not stored"
CUT = "prompt cut or redacted"
BAD_RESPONSE = "response not readable"

_OTHER_ENDPOINTS = ("/embeddings", "/moderations", "/audio/", "/images/", "/rerank")
_COUNTING = ("/count_tokens", "/input_tokens")
_OTHER_MODELS = ("embedding", "moderation", "whisper", "tts-", "dall-e", "rerank")
_PROMPT_KEYS = ("messages", "input", "prompt", "instructions", "contents")


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one row of a gateway or a tracer says about one request; None is unknown."""

    body: Any  # as sent, or its JSON text
    response: Any = None  # as received, its JSON text or the text of a stream
    url: str = ""
    betas: str | None = None
    # Counted by the gateway, where the response has none.
    usage: Usage = field(default_factory=Usage)
    times: Times = field(default_factory=Times)
    status: Any = None  # of HTTP, or a word
    request_id: str | None = None
    conversation: str | None = None
    parent_id: str | None = None
    provider: str | None = None
    model: str | None = None  # called, if the body names an alias
    response_model: str | None = None
    cache_scope: str = ""
    replica: str | None = None
    template: str | None = None


def has_prompt(body: Any) -> bool:
    """Whether a body holds messages or a prompt."""
    return isinstance(body, Mapping) and any(body.get(key) for key in _PROMPT_KEYS)


def requests_of_exchange(
    row: Row, quality: ReadQuality, exchange: Exchange
) -> Iterator[LoggedRequest]:
    """The requests of an exchange: several for a list of prompts, none if the attempt failed.

    Raises:
        BadRowError: the body is of no known API.
    """
    body = decode_nested(exchange.body)
    if is_other_call(exchange.url, exchange.model, body):
        quality.skipped[NO_REQUEST] += 1
        return
    answer = _response_of(exchange.response, quality)
    info: dict[str, Any] = {
        "request_id": exchange.request_id,
        "conversation": exchange.conversation,
        "parent_id": exchange.parent_id,
        "start_s": exchange.times.start_s,
        "first_output_s": exchange.times.first_output_s,
        "end_s": exchange.times.end_s,
        "provider": exchange.provider,
        "response_model": exchange.response_model,
        "cache_scope": exchange.cache_scope or None,
        "replica": exchange.replica,
        "template": exchange.template,
    }
    if not has_prompt(body):
        if isinstance(body, str) and body.strip() and not is_cut_json(body):
            body = {"prompt": body}
        else:
            if is_failed_status(exchange.status) or answer.is_failure:
                quality.skipped[FAILED] += 1
                return
            yield _without_text(row, quality, exchange, answer, info)
            return
    if exchange.model is not None:
        body = {**body, "model": exchange.model}
    bodies = parse_bodies(body, url_path=exchange.url, betas=exchange.betas)
    for request in requests_of(row, quality, bodies, answer, status=exchange.status, **info):
        yield _checked(request, exchange.usage, quality)


def is_other_call(url: str, model: str | None, body: Any) -> bool:
    """Whether a body counts tokens or, with `input`, is of embeddings, moderation or speech."""
    if url.partition("?")[0].rstrip("/").endswith(_COUNTING):
        return True
    if not isinstance(body, dict) or "messages" in body:
        return False
    if any(word in url for word in _OTHER_ENDPOINTS):
        return True
    name = model or body.get("model")
    return isinstance(name, str) and any(word in name.lower() for word in _OTHER_MODELS)


def requests_of_rows(
    row: Row,
    quality: ReadQuality,
    values: Sequence[Any],
    exchange_of: Callable[[Mapping[str, Any]], Exchange | None],
) -> Iterator[LoggedRequest]:
    """The requests of the values that a row holds, with an index if it holds several.

    Args:
        row: of the log.
        quality: counts what is skipped.
        values: the row's own value, or what a page, a trace or an archive contains.
        exchange_of: gives None for a value that is no request.

    Raises:
        BadRowError: the row's only value cannot be read; among several, the line is counted as bad.
    """
    error: BadRowError | None = None
    number = 0
    if not values:
        quality.skipped[NO_REQUEST] += 1
    for value in values:
        try:
            if not isinstance(value, dict):
                raise BadRowError("row is no object")
            exchange = exchange_of(value)
            if exchange is None:
                continue
            for request in requests_of_exchange(row, quality, exchange):
                yield request if len(values) == 1 else replace(request, index=number)
                number += 1
        except BadRowError as reading_error:
            error = reading_error
    if error is not None:
        if len(values) == 1:
            raise error
        quality.add_bad_line(row.file, row.line, str(error))


class ExchangeReader(RowReader):
    """Reads rows that hold exchanges and need no other rows.

    Args:
        values_of: the values that a row holds: itself, or what a page, a trace or an archive contains.
        exchange_of: gives None for a value that is no request, which it counts as skipped.
        quality: counts what is skipped.
    """

    def __init__(
        self,
        values_of: Callable[[Any], Sequence[Any]],
        exchange_of: Callable[[Mapping[str, Any], ReadQuality], Exchange | None],
        quality: ReadQuality,
    ) -> None:
        self._values_of, self._exchange_of, self._quality = values_of, exchange_of, quality

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        return requests_of_rows(
            row,
            self._quality,
            self._values_of(row.value),
            lambda value: self._exchange_of(value, self._quality),
        )


def _response_of(value: Any, quality: ReadQuality) -> ResponseFields:
    if value is None or value in ("", {}, [], "{}", "[]", "null"):
        return ResponseFields()
    try:
        return parse_response(value)
    except BadRowError:
        quality.notes[BAD_RESPONSE] += 1
        return ResponseFields()


def _checked(request: LoggedRequest, usage: Usage, quality: ReadQuality) -> LoggedRequest:
    changes: dict[str, Any] = {"usage": merge_usage(request.usage, usage)}
    if is_redacted(request.segments):
        quality.notes[CUT] += 1
        changes["has_full_text"] = False
    return replace(request, **changes)


def _without_text(
    row: Row,
    quality: ReadQuality,
    exchange: Exchange,
    answer: ResponseFields,
    info: dict[str, Any],
) -> LoggedRequest:
    quality.notes[CUT if is_cut_json(exchange.body) else NO_PROMPT] += 1
    fields: dict[str, Any] = {
        "request_id": answer.response_id,
        "provider": answer.provider,
        "response_model": answer.model,
        "verdict": answer.verdict,
        "output": answer.output,
    }
    fields.update({key: value for key, value in info.items() if value is not None})
    named = exchange.body.get("model") if isinstance(exchange.body, dict) else None
    model = exchange.model or text_or_none(named) or answer.model
    return LoggedRequest(
        *row.place,
        segments=tuple(settings_of({"model": model})) if model else (),
        model=model,
        has_full_text=False,
        usage=merge_usage(answer.usage, exchange.usage),
        **fields,
    )
