"""LangSmith: run records, one a line, in an array or as `{"runs": […]}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ramify.analysis.reader import LogFormat, ReadQuality
from ramify.analysis.readers.bodies.exchanges import FAILED, NO_REQUEST, Exchange, ExchangeReader
from ramify.analysis.readers.bodies.usage import count, parse_usage
from ramify.analysis.readers.gateways.hosts import provider_of_name
from ramify.analysis.readers.gateways.langchain_messages import (
    chat_message_of,
    chat_messages,
    is_items,
)
from ramify.analysis.readers.nested_json import decode_nested
from ramify.analysis.readers.row_fields import first_text, mapping_in, merge_usage
from ramify.analysis.readers.times import Times, parse_time, time_of
from ramify.analysis.records import Usage

# Of `extra.metadata`; the session_id of a run itself is the project.
_CONVERSATION_KEYS = ("thread_id", "session_id", "conversation_id")
_MODEL_KEYS = ("ls_model_name", "model", "model_name")


def is_langsmith_row(value: Any) -> bool:
    """Whether a row is a run, or an object that holds runs."""
    return isinstance(value, dict) and any(map(_is_run, _values_of(value)))


def _values_of(value: Mapping[str, Any]) -> list[Any]:
    """The runs that a row holds; else the row, which is a run."""
    runs = value.get("runs")
    return runs if isinstance(runs, list) else [value]


def _is_run(value: Any) -> bool:
    return isinstance(value, dict) and (
        "dotted_order" in value or ("run_type" in value and "inputs" in value)
    )


def _exchange_of(run: Mapping[str, Any], quality: ReadQuality) -> Exchange | None:
    """Each run of type `llm` that did not fail is a request.

    LangChain's message objects become messages of a chat body: the order of keys in tool arguments
    is kept, spaces in them are not.
    """
    if run.get("run_type") != "llm":
        quality.skipped[NO_REQUEST] += 1
        return None
    if run.get("error") or run.get("status") == "error":
        quality.skipped[FAILED] += 1
        return None
    extra = mapping_in(run.get("extra"))
    metadata = mapping_in(extra.get("metadata"))
    parameters = mapping_in(extra.get("invocation_params"))
    outputs = mapping_in(run.get("outputs"))
    message = _answer_of(outputs)
    body = _body_of(mapping_in(run.get("inputs")), parameters, metadata)
    answered = mapping_in(message.get("response_metadata"))
    return Exchange(
        body=body,
        response=_response_of(outputs, message),
        usage=_usage_of(run, outputs, message, metadata),
        times=Times.in_order(
            parse_time(run.get("start_time")),
            _first_token(run),
            parse_time(run.get("end_time")),
        ),
        request_id=first_text(answered, ("id",)) or first_text(run, ("id",)),
        conversation=first_text(metadata, _CONVERSATION_KEYS),
        provider=provider_of_name(
            first_text(metadata, ("ls_provider",)), first_text(body, ("model",))
        ),
        response_model=first_text(answered, ("model_name", "model")),
    )


def _body_of(
    inputs: Mapping[str, Any], parameters: Mapping[str, Any], metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """The request: inputs over invocation parameters, messages as of the wire."""
    model = first_text(parameters, _MODEL_KEYS) or first_text(metadata, _MODEL_KEYS)
    body: dict[str, Any] = {**({} if model is None else {"model": model}), **parameters, **inputs}
    if "messages" in body:
        body["messages"] = chat_messages(decode_nested(body["messages"]))
    elif isinstance(body.get("prompts"), list):
        body["prompt"] = [text for text in body.pop("prompts") if isinstance(text, str)]
    elif isinstance(body.get("input"), list):
        items = body["input"]
        body["input"] = items if is_items(items) else chat_messages(items)
    tools = body.get("tools")
    if tools is None and isinstance(body.get("functions"), list):
        body["functions"] = [decode_nested(tool) for tool in body["functions"]]
    return body


def _answer_of(outputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of the message in the first generation; empty if there is none."""
    generations = outputs.get("generations")
    while isinstance(generations, list) and generations:
        generations = generations[0]
    message = generations.get("message") if isinstance(generations, dict) else None
    if message is None:
        messages = outputs.get("messages")
        message = (
            messages[-1] if isinstance(messages, list) and messages else outputs.get("message")
        )
    if not isinstance(message, dict):
        return {}
    kwargs = message.get("kwargs", message.get("data"))
    return {**kwargs, "_wire": chat_message_of(message)} if isinstance(kwargs, dict) else message


def _response_of(outputs: Mapping[str, Any], message: Mapping[str, Any]) -> Any:
    """A response of the wire, where SDK wrappers stored it; else one around the message."""
    if "choices" in outputs or "output" in outputs or "usage" in outputs:
        return outputs
    wire = message.get("_wire")
    return {"choices": [{"message": wire}]} if isinstance(wire, dict) else None


def _usage_of(
    run: Mapping[str, Any],
    outputs: Mapping[str, Any],
    message: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> Usage:
    usage = Usage()
    model_output = mapping_in(outputs.get("llm_output"))
    answered = mapping_in(message.get("response_metadata"))
    for holder in (
        message.get("usage_metadata"),
        outputs.get("usage_metadata"),
        metadata.get("usage_metadata"),
        answered.get("token_usage", answered.get("usage")),
        model_output.get("token_usage", model_output.get("usage")),
    ):
        counts = mapping_in(holder)
        if counts:
            usage = merge_usage(usage, _usage_metadata(counts))
    details = mapping_in(run.get("prompt_token_details"))
    beside = Usage(
        num_input=count(run.get("prompt_tokens")) or None,
        num_read=count(details.get("cache_read")),
        num_written=count(details.get("cache_creation")),
        num_output=count(run.get("completion_tokens")) or None,
    )
    return merge_usage(usage, beside)


def _usage_metadata(counts: Mapping[str, Any]) -> Usage:
    usage = parse_usage(counts)
    details = mapping_in(counts.get("input_token_details"))
    written_1h = count(details.get("ephemeral_1h_input_tokens"))
    if written_1h is None:
        return usage
    written_5m = count(details.get("ephemeral_5m_input_tokens")) or 0
    written = usage.num_written or written_5m + written_1h
    return replace(usage, num_written=written, num_written_1h=written_1h)


def _first_token(run: Mapping[str, Any]) -> float | None:
    time = time_of(run, "first_token_time")
    events = run.get("events")
    if time is not None or not isinstance(events, list):
        return time
    for event in events:
        if isinstance(event, dict) and event.get("name") == "new_token":
            return parse_time(event.get("time"))
    return None


LANGSMITH = LogFormat(
    "langsmith", is_langsmith_row, partial(ExchangeReader, _values_of, _exchange_of)
)
