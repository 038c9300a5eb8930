"""LiteLLM: payloads of its logging callbacks and rows of the table `LiteLLM_SpendLogs`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ramify.analysis.reader import LogFormat, ReadQuality, Row, RowReader
from ramify.analysis.readers.bodies.exchanges import (
    FAILED,
    NO_REQUEST,
    OWN_CACHE,
    Exchange,
    has_prompt,
    requests_of_exchange,
)
from ramify.analysis.readers.bodies.usage import count, parse_usage
from ramify.analysis.readers.gateways.hosts import provider_of_name, server_of, tenant_of
from ramify.analysis.readers.nested_json import decode_nested
from ramify.analysis.readers.row_fields import first_text, mapping_in, merge_usage
from ramify.analysis.readers.times import Times, parse_time
from ramify.analysis.records import LoggedRequest, Usage

_OTHER_CALLS = (
    "embedding image speech transcription rerank moderation batch file ocr video vector_store "
    "search assistants thread create_run count_tokens realtime skill mcp container".split()
)
_TEAM_KEYS = ("team_id", "user_api_key_team_id")
_KEY_KEYS = ("user_api_key_hash", "api_key", "user_api_key")
_SESSION_KEYS = ("session_id", "litellm_session_id")


def is_litellm_row(value: Any) -> bool:
    """Whether a row is of LiteLLM: `call_type` with `startTime`."""
    if not isinstance(value, dict):
        return False
    inner = value.get("standard_logging_object")
    row = inner if isinstance(inner, dict) else value
    return "call_type" in row and "startTime" in row


class LiteLlmReader(RowReader):
    """Each successful row that reached a vendor is a request.

    `cache_hit` is LiteLLM's own cache of responses: such a row reached no vendor. `trace_id` groups
    the attempts of a call, of which the failed ones are skipped; `session_id` is the conversation.
    """

    def __init__(self, quality: ReadQuality) -> None:
        self._quality = quality
        self._seen: set[int] = set()

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        value = row.value.get("standard_logging_object")
        value = value if isinstance(value, dict) else row.value
        metadata = mapping_in(value.get("metadata"))
        reason = self._reason_to_skip(value, metadata)
        if reason is not None:
            self._quality.skipped[reason] += 1
            return
        yield from requests_of_exchange(row, self._quality, _exchange_of(value, metadata))

    def _reason_to_skip(self, value: Mapping[str, Any], metadata: Mapping[str, Any]) -> str | None:
        call_type = value.get("call_type")
        if isinstance(call_type, str) and any(word in call_type for word in _OTHER_CALLS):
            return NO_REQUEST
        if "failure" in (value.get("status"), metadata.get("status")):
            return FAILED
        if value.get("cache_hit") is True or str(value.get("cache_hit")).lower() == "true":
            return OWN_CACHE
        identity = first_text(value, ("id", "request_id"))
        if identity is not None:
            key = hash((identity, str(value.get("startTime"))))
            if key in self._seen:
                return "logged twice"
            self._seen.add(key)
        return None


def _exchange_of(value: Mapping[str, Any], metadata: Mapping[str, Any]) -> Exchange:
    hidden = mapping_in(value.get("hidden_params"))
    model = first_text(value, ("model",))
    provider = first_text(value, ("custom_llm_provider",))
    call_type = value.get("call_type")
    return Exchange(
        body=_body_of(value, metadata),
        response=value.get("response"),
        url="/v1/messages" if call_type in ("anthropic_messages", "aanthropic_messages") else "",
        usage=_usage_of(value, metadata),
        times=Times.in_order(
            parse_time(value.get("startTime")),
            parse_time(value.get("completionStartTime")),
            parse_time(value.get("endTime")),
        ),
        request_id=first_text(value, ("id", "request_id")),
        conversation=first_text(value, _SESSION_KEYS) or _session_of(metadata),
        provider=provider_of_name(provider, model),
        model=_model_called(model, provider),
        cache_scope=tenant_of(
            "team", first_text(value, _TEAM_KEYS) or first_text(metadata, _TEAM_KEYS)
        )
        or tenant_of("key", first_text(value, _KEY_KEYS) or first_text(metadata, _KEY_KEYS)),
        replica=first_text(value, ("model_id",))
        or first_text(hidden, ("model_id",))
        or server_of(value.get("api_base") or hidden.get("api_base")),
    )


def _session_of(metadata: Mapping[str, Any]) -> str | None:
    for holder in (
        metadata,
        metadata.get("requester_metadata"),
        metadata.get("spend_logs_metadata"),
    ):
        if isinstance(holder, dict):
            session = first_text(holder, _SESSION_KEYS)
            if session is not None:
                return session
    return None


def _model_called(model: str | None, provider: str | None) -> str | None:
    """The model without the provider that LiteLLM puts in front."""
    if model is not None and provider and model.startswith(provider + "/"):
        return model[len(provider) + 1 :]
    return model


def _body_of(value: Mapping[str, Any], metadata: Mapping[str, Any]) -> Any:
    """The body that the client sent, else one made of messages and parameters."""
    for holder in (value, metadata):
        request = mapping_in(holder.get("proxy_server_request"))
        body = mapping_in(request.get("body")) or request
        if has_prompt(body):
            return body
    parameters = mapping_in(value.get("model_parameters"))
    messages = decode_nested(value.get("messages"))
    if isinstance(messages, dict):
        return {**parameters, **messages}
    if not messages:
        return parameters
    call_type = value.get("call_type")
    is_responses = isinstance(call_type, str) and "responses" in call_type
    if is_responses or isinstance(messages, str):
        return {**parameters, ("input" if is_responses else "prompt"): messages}
    return {**parameters, "messages": messages}


def _usage_of(value: Mapping[str, Any], metadata: Mapping[str, Any]) -> Usage:
    """Counts beside the response: totals of the row, details of the metadata."""
    usage = parse_usage(mapping_in(metadata.get("usage_object")))
    details = dict(mapping_in(metadata.get("additional_usage_values")))
    total = count(value.get("prompt_tokens"))
    if total:
        details["prompt_tokens"] = total
    if count(value.get("completion_tokens")):
        details["completion_tokens"] = value["completion_tokens"]
    return merge_usage(usage, parse_usage(details))


LITELLM = LogFormat("litellm", is_litellm_row, LiteLlmReader)
