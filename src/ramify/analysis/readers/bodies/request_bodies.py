"""Request bodies of all APIs, recognised by their keys, and the requests that they become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ramify.analysis.reader import BadRowError, ReadQuality, Row
from ramify.analysis.readers.bodies.anthropic_bodies import parse_anthropic
from ramify.analysis.readers.bodies.body_fields import CHAT, BodyFields, is_cut
from ramify.analysis.readers.bodies.gemini_bodies import parse_gemini
from ramify.analysis.readers.bodies.openai_bodies import parse_chat, parse_completions
from ramify.analysis.readers.bodies.responses import ResponseFields
from ramify.analysis.readers.bodies.responses_bodies import parse_responses
from ramify.analysis.readers.bodies.segments import num_messages, shift_messages
from ramify.analysis.records import LoggedRequest, VendorVerdict

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "model"})
_ANTHROPIC_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")
_HOSTS = (
    ("anthropic", "anthropic"),
    ("deepseek", "deepseek"),
    ("openai.com", "openai"),
    ("openai.azure", "openai"),
    ("bedrock", "bedrock"),
)
_MODELS = (
    ("claude", "anthropic"),
    ("deepseek", "deepseek"),
    ("gpt-", "openai"),
    ("o1", "openai"),
    ("o3", "openai"),
    ("o4", "openai"),
    ("gemini", "gemini"),
)


def is_body(value: object) -> bool:
    """Whether a value is a request body of a known API."""
    if not isinstance(value, Mapping):
        return False
    messages = value.get("messages")
    if isinstance(messages, list):
        return not messages or any(_is_message(message) for message in messages)
    contents = value.get("contents")
    if isinstance(contents, list) and contents:
        return all(isinstance(item, dict) and "parts" in item for item in contents)
    prompt = value.get("prompt")
    if isinstance(prompt, str | list) and "choices" not in value:
        return isinstance(prompt, str) or all(isinstance(item, str | int | list) for item in prompt)
    if "model" not in value or value.get("object") == "response":
        return False
    return isinstance(value.get("input"), str | list) or isinstance(prompt, dict)


def _is_message(value: object) -> bool:
    role = value.get("role") if isinstance(value, Mapping) else None
    return isinstance(role, str) and role in _ROLES


def parse_bodies(
    body: Mapping[str, Any], *, url_path: str = "", betas: object = None
) -> tuple[BodyFields, ...]:
    """Prompts of a body; a completion may have several.

    Args:
        body: as sent.
        url_path: path or URL it was sent to, which decides between APIs and names the vendor.
        betas: names of an `anthropic-beta` header.

    Raises:
        BadRowError: the body is of no known API.
    """
    provider = next((name for part, name in _HOSTS if part in url_path), None)
    fields = _parse(body, url_path, betas)
    if provider is not None:
        fields = tuple(replace(item, provider=provider) for item in fields)
    return tuple(_with_cut_noted(item) for item in fields)


def _parse(body: Mapping[str, Any], url_path: str, betas: object) -> tuple[BodyFields, ...]:
    if isinstance(body.get("messages"), list):
        if url_path.rstrip("/").endswith("chat/completions"):
            return (parse_chat(body),)
        if "/v1/messages" in url_path or "/converse" in url_path or is_anthropic(body):
            return (parse_anthropic(body, betas=betas),)
        return (parse_chat(body),)
    if "contents" in body:
        return (parse_gemini(body, url_path=url_path),)
    if "input" in body or "instructions" in body or isinstance(body.get("prompt"), Mapping):
        return (parse_responses(body),)
    if "prompt" in body:
        return parse_completions(body)
    raise BadRowError("request has none of messages, input, prompt, contents")


def is_anthropic(body: Mapping[str, Any]) -> bool:
    """Whether a body with `messages` is of Anthropic's API or of Converse, not a chat completion."""
    if "system" in body or "toolConfig" in body or "anthropic_version" in body:
        return True
    tools = body.get("tools")
    if isinstance(tools, list) and tools:
        if any(isinstance(tool, Mapping) and "function" in tool for tool in tools):
            return False
        if any(isinstance(tool, Mapping) and "input_schema" in tool for tool in tools):
            return True
    if "cache_control" in body or "diagnostics" in body or "output_config" in body:
        return True
    messages = body["messages"]
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        if message.get("role") in ("tool", "function", "developer") or "tool_calls" in message:
            return False
        content = message.get("content")
        if isinstance(content, list) and any(
            isinstance(block, Mapping)
            and (block.get("type") in _ANTHROPIC_BLOCKS or "source" in block)
            for block in content
        ):
            return True
    return str(body.get("model", "")).startswith(("claude", "anthropic.")) and "max_tokens" in body


def _with_cut_noted(fields: BodyFields) -> BodyFields:
    if fields.has_full_text and is_cut(fields.segments):
        return replace(fields, has_full_text=False, note="text was cut by a gateway")
    return fields


def logged_request(
    row: Row,
    body: BodyFields,
    response: ResponseFields | None = None,
    *,
    index: int | None = None,
    **info: Any,
) -> LoggedRequest:
    """The request of a body and its response.

    Args:
        row: where the body was logged.
        body: one prompt.
        response: what was answered, if it is logged.
        index: among several requests of the row's line.
        info: fields of `LoggedRequest` that the row knows; None leaves what body and response say.
    """
    answer = ResponseFields() if response is None else response
    fields: dict[str, Any] = {
        "segments": body.segments,
        "output": shift_messages(answer.output, num_messages(body.segments)),
        "request_id": answer.response_id,
        "conversation": body.conversation,
        "history_id": body.history_id,
        "start_s": answer.created_s,
        "api": body.api,
        "provider": provider_of(body, answer),
        "model": body.model or answer.model,
        "response_model": answer.model,
        "cache_scope": body.cache_scope,
        "cache_key": body.cache_key,
        "retention_s": body.retention_s,
        "has_full_text": body.has_full_text,
        "usage": answer.usage,
        "verdict": answer.verdict,
    }
    if fields["verdict"] is None and body.compares_with and answer.finds_no_divergence:
        fields["verdict"] = VendorVerdict("none")
    has_full_text = info.pop("has_full_text", True)
    fields.update({key: value for key, value in info.items() if value is not None})
    if info.get("cache_scope") and body.cache_scope:
        # A tenant's salts tell caches apart as well.
        fields["cache_scope"] = f"{info['cache_scope']} {body.cache_scope}"
    fields["has_full_text"] = body.has_full_text and has_full_text is not False
    return LoggedRequest(
        file=row.file, line=row.line, index=row.index if index is None else index, **fields
    )


def requests_of(
    row: Row,
    quality: ReadQuality,
    bodies: tuple[BodyFields, ...],
    response: ResponseFields | None = None,
    *,
    status: object = None,
    **info: Any,
) -> Iterator[LoggedRequest]:
    """The requests of a row, none if the attempt failed; several prompts have an index.

    Args:
        row: where the exchange was logged.
        quality: counts failed attempts and missing text.
        bodies: prompts of the request.
        response: as logged.
        status: of HTTP; 400 and more is a failed attempt.
        info: see `logged_request`.
    """
    if is_failed_status(status) or (response is not None and response.is_failure):
        quality.skipped["failed attempt"] += 1
        return
    for number, body in enumerate(bodies):
        if body.note is not None:
            quality.notes[body.note] += 1
        index = number if len(bodies) > 1 else None
        yield logged_request(row, body, response, index=index, **info)


def is_failed_status(status: object) -> bool:
    """Whether a status, a number or its text, is of a failed attempt."""
    if isinstance(status, str):
        if status.isascii() and status.isdecimal() and len(status) < 9:
            return int(status) >= 400
        return status.lower() in {"error", "errored", "failed", "failure", "expired", "canceled"}
    return isinstance(status, int) and not isinstance(status, bool) and status >= 400


def provider_of(body: BodyFields, response: ResponseFields) -> str | None:
    """The vendor: by usage, by the API, by the model's name as a last resort."""
    if response.provider is not None and body.provider in {None, response.provider}:
        return response.provider
    if body.provider is not None:
        return body.provider
    name = (body.model or response.model or "").rpartition("/")[2].lower()
    provider = next((vendor for prefix, vendor in _MODELS if name.startswith(prefix)), None)
    return provider if provider is not None or body.api != CHAT else None
