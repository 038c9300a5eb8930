"""LiteLLM: payloads of its logging callbacks and rows of the table `LiteLLM_SpendLogs`.

`trace_id` groups the attempts of a call, of which the failed ones are skipped; `session_id` is the
conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ramify.analysis.reader import LogFormat
from ramify.analysis.readers.bodies.exchanges import (
    FAILED,
    NO_REQUEST,
    OWN_CACHE,
    Exchange,
    has_prompt,
)
from ramify.analysis.readers.bodies.usage import count, parse_usage
from ramify.analysis.readers.columns import Columns, columns_reader, text_at
from ramify.analysis.readers.nested_json import decode_nested
from ramify.analysis.readers.row_fields import mapping_in, merge_usage
from ramify.analysis.records import Usage

_OTHER_CALLS = (
    "embedding image speech transcription rerank moderation batch file ocr video vector_store "
    "search assistants thread create_run count_tokens realtime skill mcp container".split()
)


def is_litellm_row(value: Any) -> bool:
    """Whether a row is of LiteLLM: `call_type` with `startTime`."""
    if not isinstance(value, dict):
        return False
    [row] = _rows_of(value)
    return "call_type" in row and "startTime" in row


def _rows_of(value: Mapping[str, Any]) -> list[Any]:
    """The payload in a record of a callback; else the row itself."""
    payload = value.get("standard_logging_object")
    return [payload if isinstance(payload, dict) else value]


def _call_type(row: Mapping[str, Any]) -> str:
    call_type = row.get("call_type")
    return call_type if isinstance(call_type, str) else ""


COLUMNS = Columns(
    skips=(
        (NO_REQUEST, lambda row: any(word in _call_type(row) for word in _OTHER_CALLS)),
        (FAILED, lambda row: "failure" in (row.get("status"), row["metadata"].get("status"))),
        (OWN_CACHE, lambda row: str(row.get("cache_hit")).lower() == "true"),
    ),
    identity=("id, request_id", "startTime"),
    objects="metadata, hidden_params",
    response="response",
    start="startTime",
    first_output="completionStartTime",
    end="endTime",
    request_id="id, request_id",
    conversation="""session_id, litellm_session_id, metadata.session_id, metadata.litellm_session_id,
        metadata.requester_metadata.session_id, metadata.requester_metadata.litellm_session_id,
        metadata.spend_logs_metadata.session_id, metadata.spend_logs_metadata.litellm_session_id""",
    provider="custom_llm_provider",
    model="model",
    scopes=(
        ("team", "team_id, user_api_key_team_id, metadata.team_id, metadata.user_api_key_team_id"),
        (
            "key",
            """user_api_key_hash, api_key, user_api_key, metadata.user_api_key_hash, metadata.api_key,
            metadata.user_api_key""",
        ),
    ),
    replica="model_id, hidden_params.model_id",
    server="api_base, hidden_params.api_base",
)


def _exchange_of(row: Mapping[str, Any]) -> Exchange:
    is_anthropic = _call_type(row) in ("anthropic_messages", "aanthropic_messages")
    # The provider stands in front of the model's name.
    provider = text_at(row, COLUMNS.provider)
    model = text_at(row, COLUMNS.model)
    return COLUMNS.exchange(
        row,
        body=_body_of(row),
        url="/v1/messages" if is_anthropic else "",
        usage=_usage_of(row),
        model=model.removeprefix(f"{provider}/") if model and provider else model,
    )


def _body_of(row: Mapping[str, Any]) -> Any:
    """The body that the client sent, else one made of messages and parameters."""
    for holder in (row, row["metadata"]):
        request = mapping_in(holder.get("proxy_server_request"))
        body = mapping_in(request.get("body")) or request
        if has_prompt(body):
            return body
    parameters = mapping_in(row.get("model_parameters"))
    messages = decode_nested(row.get("messages"))
    if isinstance(messages, dict):
        return {**parameters, **messages}
    if not messages:
        return parameters
    if "responses" in _call_type(row):
        return {**parameters, "input": messages}
    return {**parameters, ("prompt" if isinstance(messages, str) else "messages"): messages}


def _usage_of(row: Mapping[str, Any]) -> Usage:
    """Counts beside the response: totals of the row, details of the metadata."""
    metadata = row["metadata"]
    usage = parse_usage(mapping_in(metadata.get("usage_object")))
    # A total of 0 is that of a call whose usage is not known.
    totals = {
        name: row[name] for name in ("prompt_tokens", "completion_tokens") if count(row.get(name))
    }
    return merge_usage(
        usage, parse_usage({**mapping_in(metadata.get("additional_usage_values")), **totals})
    )


LITELLM = LogFormat(
    "litellm", is_litellm_row, partial(columns_reader, COLUMNS, _exchange_of, rows_of=_rows_of)
)
