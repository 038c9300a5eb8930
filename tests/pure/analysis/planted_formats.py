"""Planted logs as files: bodies wrapped as SDKs, vendors, gateways and tracers write them. Stdlib only."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.pure.analysis.planted_bodies import Body
from tests.pure.analysis.planted_logs import Mended, PlantedLog, PlantedRequest, make_log
from tests.pure.analysis.planted_words import Rng


@dataclass(frozen=True, slots=True)
class FormatRow:
    """A format: the API whose bodies it wraps, whether it has times, and how a row is made."""

    api: str
    has_times: bool
    row: Callable[[PlantedRequest, Body], Any]
    noise: Callable[[PlantedRequest, Body], Any] | None = None  # a row that is no request


def _iso(at: float) -> str:
    return (
        dt.datetime.fromtimestamp(at, dt.UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def _num_tokens(body: Body) -> int:
    return len(json.dumps(body)) // 4


def _answer(request: PlantedRequest, body: Body) -> Body:
    """A response with usage that says nothing about the cache."""
    number = _num_tokens(body)
    if request.api == "anthropic":
        return {
            "id": f"msg_{request.number:024d}", "type": "message", "role": "assistant",
            "model": body["model"], "content": [{"type": "text", "text": "Done."}],
            "stop_reason": "end_turn",
        }  # fmt: skip
    if request.api == "responses":
        return {
            "id": f"resp_{request.number:024d}", "object": "response", "model": body["model"],
            "created_at": int(request.start_s), "output": [],
            "usage": {"input_tokens": number, "output_tokens": 5, "total_tokens": number + 5},
        }  # fmt: skip
    return {
        "id": f"chatcmpl-{request.number:024d}", "object": "chat.completion", "model": body["model"],
        "created": int(request.start_s),
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Done."}}],
        "usage": {"prompt_tokens": number, "completion_tokens": 5, "total_tokens": number + 5},
    }  # fmt: skip


def _sampled(request: PlantedRequest, body: Body) -> Body:
    return {**body, **request.sampling} if request.number % 2 else {**request.sampling, **body}


def _openai_batch(request: PlantedRequest, body: Body) -> Body:
    return {
        "custom_id": f"request-{request.number}", "method": "POST", "url": "/v1/chat/completions",
        "body": _sampled(request, body),
    }  # fmt: skip


def _anthropic_batch(request: PlantedRequest, body: Body) -> Body:
    return {"custom_id": f"request-{request.number}", "params": _sampled(request, body)}


def _litellm(request: PlantedRequest, body: Body) -> Body:
    parameters = {key: value for key, value in body.items() if key not in {"model", "messages"}}
    return {
        "id": f"chatcmpl-{request.number:024d}", "trace_id": f"trace-{request.cell}-{request.conversation}",
        "call_type": "acompletion", "stream": False, "response_cost": 0.001, "status": "success",
        "custom_llm_provider": "openai", "total_tokens": _num_tokens(body) + 5,
        "prompt_tokens": _num_tokens(body), "completion_tokens": 5,
        "startTime": request.start_s, "endTime": request.end_s, "completionStartTime": request.end_s,
        "model": body["model"], "model_id": "deployment-1", "model_group": body["model"],
        "api_base": "https://api.openai.com/v1", "metadata": {"user_api_key_hash": "0f" * 32},
        "cache_hit": False, "cache_key": f"{request.number:064x}", "request_tags": [], "end_user": "",
        "messages": body["messages"], "response": _answer(request, body),
        "model_parameters": {**request.sampling, **parameters}, "hidden_params": {},
    }  # fmt: skip


def _litellm_failed(request: PlantedRequest, body: Body) -> Body:
    return {
        **_litellm(request, body),
        "status": "failure",
        "response": {},
        "error_str": "429 rate limited",
    }


def _langfuse(request: PlantedRequest, body: Body) -> Body:
    stamp = dt.datetime.fromtimestamp(request.start_s, dt.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
    end = dt.datetime.fromtimestamp(request.end_s, dt.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
    sent = {key: value for key, value in body.items() if key != "model"}
    return {
        "id": f"obs-{request.number}", "trace_id": f"trace-{request.number}", "project_id": "p1",
        "environment": "default", "type": "GENERATION", "name": "chat", "start_time": stamp, "end_time": end,
        "provided_model_name": body["model"], "model_parameters": json.dumps(request.sampling),
        "input": json.dumps(sent, ensure_ascii=False),
        "output": json.dumps({"role": "assistant", "content": "Done."}),
        "usage_details": {"input": _num_tokens(body), "output": 5}, "cost_details": {},
        "session_id": f"session-{request.cell}-{request.conversation}",
    }  # fmt: skip


def _langfuse_span(request: PlantedRequest, body: Body) -> Body:
    return {
        **_langfuse(request, body),
        "id": f"span-{request.number}",
        "type": "SPAN",
        "usage_details": {},
    }


def _helicone(request: PlantedRequest, body: Body) -> Body:
    return {
        "request_id": f"helicone-{request.number}", "request_created_at": _iso(request.start_s),
        "request_body": _sampled(request, body), "request_path": "https://api.anthropic.com/v1/messages",
        "request_user_id": None, "request_properties": {}, "request_model": body["model"],
        "response_body": _answer(request, body), "response_status": 200, "response_model": body["model"],
        "provider": "ANTHROPIC", "delay_ms": round((request.end_s - request.start_s) * 1000),
    }  # fmt: skip


def _helicone_failed(request: PlantedRequest, body: Body) -> Body:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    return {**_helicone(request, body), "response_status": 529, "response_body": error}


def _har(request: PlantedRequest, body: Body) -> Body:
    path = {"anthropic": "anthropic.com/v1/messages", "responses": "openai.com/v1/responses"}
    return {
        "startedDateTime": _iso(request.start_s), "time": round((request.end_s - request.start_s) * 1000, 1),
        "request": {
            "method": "POST", "url": f"https://api.{path[request.api]}", "httpVersion": "HTTP/2",
            "headers": [{"name": "authorization", "value": "Bearer sk-secret-0123456789abcdef"}],
            "postData": {"mimeType": "application/json", "text": json.dumps(_sampled(request, body))},
        },
        "response": {
            "status": 200, "headers": [],
            "content": {"mimeType": "application/json", "text": json.dumps(_answer(request, body))},
        },
    }  # fmt: skip


def _har_other(request: PlantedRequest, body: Body) -> Body:
    entry = _har(request, body)
    return {
        **entry,
        "request": {"method": "GET", "url": "https://example.com/logo.png", "headers": []},
    }


def _attribute(key: str, value: Any) -> Body:
    if isinstance(value, int):
        return {"key": key, "value": {"intValue": str(value)}}
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return {"key": key, "value": {"stringValue": text}}


def _otlp(request: PlantedRequest, body: Body) -> Body:
    fields = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", **body,
        "gen_ai.conversation.id": f"conversation-{request.cell}-{request.conversation}",
        "gen_ai.usage.input_tokens": _num_tokens(body), "gen_ai.usage.output_tokens": 5,
    }  # fmt: skip
    return _otlp_span(request, f"chat {body['gen_ai.request.model']}", fields)


def _otlp_span(request: PlantedRequest, name: str, fields: Body) -> Body:
    span = {
        "traceId": f"{request.number + 1:032x}", "spanId": f"{request.number + 1:016x}", "name": name, "kind": 3,
        "startTimeUnixNano": str(int(request.start_s * 1000) * 10**6),
        "endTimeUnixNano": str(int(request.end_s * 1000) * 10**6),
        "attributes": [_attribute(key, value) for key, value in fields.items()],
    }  # fmt: skip
    scope = {"scope": {"name": "opentelemetry.instrumentation"}, "spans": [span]}
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [scope]}]}


def _otlp_other(request: PlantedRequest, body: Body) -> Body:
    return _otlp_span(request, "GET /orders", {"http.request.method": "GET"})


FORMATS: dict[str, FormatRow] = {
    "openai_chat": FormatRow("chat", False, _sampled),
    "openai_responses": FormatRow("responses", False, _sampled),
    "anthropic": FormatRow("anthropic", False, _sampled),
    "openai_batch": FormatRow("chat", False, _openai_batch),
    "anthropic_batch": FormatRow("anthropic", False, _anthropic_batch),
    "litellm": FormatRow("chat", True, _litellm, _litellm_failed),
    "langfuse": FormatRow("chat", True, _langfuse, _langfuse_span),
    "helicone": FormatRow("anthropic", True, _helicone, _helicone_failed),
    "har": FormatRow("anthropic", True, _har, _har_other),
    "har_responses": FormatRow("responses", True, _har, _har_other),
    "otlp": FormatRow("otlp", True, _otlp, _otlp_other),
}


@dataclass(frozen=True, slots=True)
class WrittenLog:
    """A file and the line of each request, by number."""

    path: Path
    lines: tuple[int, ...]
    bad_lines: tuple[int, ...]


def planted_log(
    seed: int, format_name: str, *, num_requests: int = 300, alone: str | None = None
) -> PlantedLog:
    """The requests of a log in a format; `alone` names the only cause."""
    form = FORMATS[format_name]
    return make_log(
        seed, num_requests=num_requests, api=form.api, has_times=form.has_times, alone=alone
    )


def write_log(
    log: PlantedLog,
    format_name: str,
    path: Path,
    *,
    mended: Mended = MappingProxyType({}),
    as_shown: bool = False,
    with_noise: bool = True,
) -> WrittenLog:
    """Write a log as sent, or with causes mended (see `mended_bodies`).

    Lines that are no JSON and rows that are no requests stand between the requests.
    """
    form, rng = FORMATS[format_name], Rng(len(log.requests))
    rows: list[str] = []
    lines: list[int] = []
    bad: list[int] = []
    is_har = format_name.startswith("har")
    bodies = log.mended_bodies(mended, as_shown=as_shown)
    for request, body in zip(log.requests, bodies, strict=True):
        if with_noise and rng.random() < 0.03 and not is_har:
            bad.append(len(rows) + 1)
            rows.append(rng.choice(['{"model": "gpt', "not json", '{"a": 1}}']))
        if with_noise and form.noise is not None and rng.random() < 0.05:
            rows.append(json.dumps(form.noise(request, body), ensure_ascii=False))
        lines.append(len(rows) + 1)
        rows.append(json.dumps(form.row(request, body), ensure_ascii=request.number % 3 == 0))
    if is_har:
        head = '{"log":{"version":"1.2","creator":{"name":"browser","version":"1"},"entries":['
        text = head + "\n" + ",\n".join(rows) + "\n]}}\n"
        lines = [line + 1 for line in lines]
    else:
        text = "\n".join(rows) + "\n"
    path.write_text(text, encoding="utf-8")
    return WrittenLog(path, tuple(lines), tuple(bad))
