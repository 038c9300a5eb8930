"""LangSmith: run records, one a line, in an array or as `{"runs": […]}`.

LangChain's message objects become messages of a chat body: the order of keys in tool arguments is
kept, spaces in them are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ramify.analysis.reader import LogFormat
from ramify.analysis.readers.bodies.exchanges import FAILED, NO_REQUEST, Exchange
from ramify.analysis.readers.bodies.usage import count, parse_usage
from ramify.analysis.readers.columns import Columns, columns_reader, text_at, value_at, values_at
from ramify.analysis.readers.gateways.hosts import provider_of_name
from ramify.analysis.readers.gateways.langchain_messages import (
    chat_message_of,
    chat_messages,
    is_items,
)
from ramify.analysis.readers.nested_json import decode_nested
from ramify.analysis.readers.row_fields import mapping_in, merge_usage
from ramify.analysis.records import Usage

# `message` is the answer, see `_answer_of`; of counts in several places, the first is taken.
_USAGES = """message.usage_metadata, outputs.usage_metadata, extra.metadata.usage_metadata,
    message.response_metadata.token_usage, message.response_metadata.usage,
    outputs.llm_output.token_usage, outputs.llm_output.usage"""

COLUMNS = Columns(
    skips=(
        (NO_REQUEST, lambda run: run.get("run_type") != "llm"),
        (FAILED, lambda run: bool(run.get("error")) or run.get("status") == "error"),
    ),
    objects="inputs, outputs, extra",
    start="start_time",
    first_output="first_token_time",
    end="end_time",
    request_id="message.response_metadata.id, id",
    # The session_id of a run itself is the project.
    conversation="""extra.metadata.thread_id, extra.metadata.session_id,
        extra.metadata.conversation_id""",
    provider="extra.metadata.ls_provider",
    model="""extra.invocation_params.ls_model_name, extra.invocation_params.model,
        extra.invocation_params.model_name, extra.metadata.ls_model_name, extra.metadata.model,
        extra.metadata.model_name""",
    response_model="message.response_metadata.model_name, message.response_metadata.model",
)


def is_langsmith_row(value: Any) -> bool:
    """Whether a row is a run, or an object that holds runs."""
    return isinstance(value, dict) and any(map(_is_run, _runs_of(value)))


def _runs_of(value: Mapping[str, Any]) -> list[Any]:
    """The runs that a row holds; else the row, which is a run."""
    runs = value.get("runs")
    return runs if isinstance(runs, list) else [value]


def _is_run(value: Any) -> bool:
    return isinstance(value, dict) and (
        "dotted_order" in value or ("run_type" in value and "inputs" in value)
    )


def _exchange_of(run: Mapping[str, Any]) -> Exchange:
    """The exchange of a run of the type `llm`."""
    message = _answer_of(run["outputs"])
    body = _body_of(run)
    run = {**run, "message": message}
    if value_at(run, COLUMNS.first_output) is None:
        run["first_token_time"] = _first_token_time(run)
    return COLUMNS.exchange(
        run,
        body=body,
        response=_response_of(run["outputs"], message),
        usage=_usage_of(run),
        provider=provider_of_name(text_at(run, COLUMNS.provider), body.get("model")),
    )


def _body_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """The request: inputs over invocation parameters, messages as of the wire."""
    model = text_at(run, COLUMNS.model)
    body: dict[str, Any] = {} if model is None else {"model": model}
    body |= mapping_in(run["extra"].get("invocation_params"))
    body |= run["inputs"]
    if "messages" in body:
        body["messages"] = chat_messages(decode_nested(body["messages"]))
    elif isinstance(body.get("prompts"), list):
        body["prompt"] = [text for text in body.pop("prompts") if isinstance(text, str)]
    elif isinstance(body.get("input"), list):
        items = body["input"]
        body["input"] = items if is_items(items) else chat_messages(items)
    if body.get("tools") is None and isinstance(body.get("functions"), list):
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


def _usage_of(run: Mapping[str, Any]) -> Usage:
    usage = Usage()
    for counts in map(mapping_in, values_at(run, _USAGES)):
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


def _first_token_time(run: Mapping[str, Any]) -> Any:
    events = run.get("events")
    for event in events if isinstance(events, list) else ():
        if isinstance(event, dict) and event.get("name") == "new_token":
            return event.get("time")
    return None


LANGSMITH = LogFormat(
    "langsmith",
    is_langsmith_row,
    partial(columns_reader, COLUMNS, _exchange_of, rows_of=_runs_of),
)
