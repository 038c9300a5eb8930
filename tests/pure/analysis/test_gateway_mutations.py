"""Damaged rows of gateways and tracers are read or are bad rows; nothing else happens."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.analysis.reader import LogFormat
from ramify.analysis.readers.gateways.gateway_csv import GATEWAY
from ramify.analysis.readers.gateways.har import HAR
from ramify.analysis.readers.gateways.helicone import HELICONE
from ramify.analysis.readers.gateways.langfuse import LANGFUSE
from ramify.analysis.readers.gateways.langsmith import LANGSMITH
from ramify.analysis.readers.gateways.litellm import LITELLM
from ramify.analysis.readers.otel.otlp_rows import OTEL
from tests.budget import examples
from tests.pure.analysis.gateway_rows import (
    anthropic_response,
    chat_response,
    har_entry,
    helicone_row,
    langfuse_row,
    otlp_export,
    otlp_logs,
    otlp_prompt,
    otlp_span,
)
from tests.pure.analysis.log_rows import read_rows
from tests.pure.analysis.test_gateway_formats import lc_messages, run_of
from tests.pure.analysis.test_gateway_litellm import payload, spend_row
from tests.pure.analysis.test_gateway_tables import table_row

CHAT: dict[str, Any] = {
    "model": "gpt-5.1",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "ok", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}  # fmt: skip
CLAUDE: dict[str, Any] = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
}
MESSAGE_RECORD = {
    "eventName": "gen_ai.user.message", "traceId": "5b8efff798038103d269b633813fc60c",
    "spanId": "eee19b7ec3c1b174", "timeUnixNano": "1764000000000000000",
    "body": {"kvlistValue": {"values": [{"key": "content", "value": {"stringValue": "hi"}}]}},
}  # fmt: skip
OPENINFERENCE = {
    "openinference.span.kind": "LLM",
    "llm.input_messages.0.message.role": "user",
    "llm.input_messages.0.message.contents.0.message_content.image.image.url": "u",
    "llm.input_messages.1.message.tool_calls.0.tool_call.function.name": "f",
    "llm.tools.0.tool.json_schema": "{}",
    "llm.invocation_parameters": '{"model": "m"}',
}
ROWS: list[tuple[LogFormat, Any]] = [
    (LITELLM, payload()),
    (LITELLM, spend_row()),
    (LANGFUSE, langfuse_row(CHAT)),
    (LANGFUSE, {"data": [langfuse_row(CHAT), langfuse_row(CHAT, id="b")]}),
    (HELICONE, helicone_row(CHAT, chat_response())),
    (HAR, har_entry(CLAUDE, anthropic_response(), "https://api.anthropic.com/v1/messages")),
    (HAR, {"log": {"entries": [har_entry(CHAT, "data: {}\n\n", "https://h/v1/chat/completions")] * 2}}),
    (LANGSMITH, run_of(CHAT, {"messages": [lc_messages(CHAT)]})),
    (LANGSMITH, run_of(CHAT, CHAT)),
    (OTEL, otlp_export(otlp_span(otlp_prompt(CLAUDE)), otlp_span(OPENINFERENCE))),
    (OTEL, otlp_export(otlp_span({
        "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "[{}]",
        "gen_ai.prompt.1.tool_calls.0.name": "f", "llm.request.functions.0.parameters": "{}"}))),
    (OTEL, otlp_logs(MESSAGE_RECORD)),
    (GATEWAY, table_row(CHAT)),
]  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 2**70, 1.5, float("nan"), float("inf"), "", " ", "[", "{", "[]", "{}",
    '"x"', "[[[[1]]]]", '{"a":{"b":[1]}}', "\ud800", "\x00", "é" * 9, [], {}, [[]], [None], [1, "a"],
    {"a": 1}, [{"role": "user"}], [{"role": 1, "content": {"a": []}}], "9" * 40, "-1", "1e999",
    {"type": "text"}, {"type": "tool_use", "input": None}, {"type": "image", "source": {"data": []}},
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value, as what holds it and its key there."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, item in items:
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def damage(row: Any, rng: random.Random) -> Any:
    """A copy of a row with some values replaced, dropped or repeated."""
    row = copy.deepcopy(row)
    for _ in range(rng.randint(1, 4)):
        holder, key = rng.choice(list(places(row)))
        action = rng.random()
        if action < 0.7:
            holder[key] = copy.deepcopy(rng.choice(ODD))
        elif action < 0.85:
            del holder[key]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        else:
            holder[f"{key}x"] = holder.pop(key)
        if not row:
            break
    return row


@pytest.mark.parametrize("number", range(len(ROWS)))
@settings(max_examples=examples(120))
@given(st.integers(0, 2**32))
def test_damaged_rows_are_read_or_bad(number: int, seed: int) -> None:
    """Whatever is in the place of a value, a row gives requests, is skipped, or is a bad line."""
    form, row = ROWS[number]
    damaged = damage(row, random.Random(seed))
    if not form.is_row(damaged):
        return

    requests, quality = read_rows(form, [damaged])

    for request in requests:
        assert (request.file, request.line) == ("log.jsonl", 1)
        assert all(isinstance(item.text, str) for item in request.segments)
    outcome = requests or quality.bad_lines or quality.skipped or form is OTEL
    assert outcome


def test_whole_rows_are_read() -> None:
    """Without damage, each of these rows gives requests."""
    for form, row in ROWS:
        requests, quality = read_rows(form, [row])

        assert form.is_row(row)
        assert not quality.bad_lines
        assert requests
