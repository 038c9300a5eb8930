"""Reasoning in the next turn, and what opens it: history, options of requests, templates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ramify.server.model_dialects.parser import ReasoningMarks
from ramify.server.model_dialects.table import ReasoningFormat
from ramify.server.request_fields.opaque_text import encode_opaque
from tests.cpu.thinker import (
    ANSWER,
    ARGUMENTS,
    CALL,
    CHAT,
    MESSAGES,
    QUESTION,
    RESPONSES,
    SERVICE,
    THINKING_TEMPLATE,
    THOUGHT,
    Thinker,
    letters,
    run,
)

RESULT = "Ann."
CHAT_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "find", "arguments": ARGUMENTS},
}
CHAT_TURN = {"role": "assistant", "content": "I look it up.", "tool_calls": [CHAT_CALL]}
CHAT_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": RESULT}
TEXT_PART = {"type": "text", "text": "I look it up."}
THINKING_PARTS = [
    {"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]},
    TEXT_PART,
]
ITEM_CALL = {"type": "function_call", "call_id": "c", "name": "find", "arguments": ARGUMENTS}
ITEMS_AFTER = [
    {"role": "assistant", "content": "I look it up."},
    ITEM_CALL,
    {"type": "function_call_output", "call_id": "c", "output": RESULT},
]
BLOCKS = [
    {"type": "thinking", "thinking": THOUGHT, "signature": "theirs"},
    {"type": "redacted_thinking", "data": "theirs"},
    TEXT_PART,
    {"type": "tool_use", "id": "t", "name": "find", "input": {"city": "Rome"}},
]
RESULT_BLOCK = {"type": "tool_result", "tool_use_id": "t", "content": RESULT}
HISTORIES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "reasoning_content": (
        "/v1/chat/completions", CHAT, [CHAT_TURN | {"reasoning_content": THOUGHT}, CHAT_RESULT],
    ),
    "reasoning": (
        "/v1/chat/completions", CHAT, [CHAT_TURN | {"reasoning": THOUGHT}, CHAT_RESULT],
    ),
    "thinking parts": (
        "/v1/chat/completions", CHAT, [CHAT_TURN | {"content": THINKING_PARTS}, CHAT_RESULT],
    ),
    "thinking blocks": (
        "/v1/messages",
        MESSAGES,
        [{"role": "assistant", "content": BLOCKS}, {"role": "user", "content": [RESULT_BLOCK]}],
    ),
    "reasoning items": (
        "/v1/responses",
        RESPONSES,
        [
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": THOUGHT}],
            },
            *ITEMS_AFTER,
        ],
    ),
    "carried reasoning": (
        "/v1/responses",
        RESPONSES,
        [
            {"type": "reasoning", "summary": [], "encrypted_content": encode_opaque(THOUGHT)},
            *ITEMS_AFTER,
        ],
    ),
    "reasoning of others": (
        "/v1/responses",
        RESPONSES,
        [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, *ITEMS_AFTER],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", HISTORIES)
def test_the_next_prompt_extends_prompt_and_answer(form: str) -> None:
    """Reasoning sent back in any form is in the prompt of the tool's result, and not after it."""
    path, body, more = HISTORIES[form]
    field = "input" if path == "/v1/responses" else "messages"
    later = {"role": "user", "content": "And in Paris?"}

    async def main() -> list[str]:
        bench, prompts = Thinker(), []
        async with bench.running():
            for history in ([QUESTION], [QUESTION, *more], [QUESTION, *more, later]):
                response = await bench.post(path, body | {field: history})
                assert response.status == 200, response.body
                prompts.append(bench.prompt)
        return prompts

    question, result, after = run(main())

    begun = "I look it up." + CALL if form == "reasoning of others" else ANSWER
    assert result == f"{question}{begun}<|end|><|user|>Result: Ann.<|end|><|assistant|>"
    assert THOUGHT not in after
    assert after.endswith("<|user|>And in Paris?<|end|><|assistant|>")


def test_a_stored_response_continues_with_its_reasoning() -> None:
    """`previous_response_id` gives the prompt that the echoed items give, and reads the answer."""

    async def main() -> tuple[str, int, int]:
        bench = Thinker()
        async with bench.running():
            first = (await bench.post("/v1/responses", RESPONSES)).json
            [call] = [item for item in first["output"] if item["type"] == "function_call"]
            result = {
                "type": "function_call_output", "call_id": call["call_id"], "output": RESULT,
            }  # fmt: skip
            body = RESPONSES | {"input": [result], "previous_response_id": first["id"]}
            second = (await bench.post("/v1/responses", body)).json
            details = second["usage"]["input_tokens_details"]
            return bench.prompt, details["cached_tokens"], first["usage"]["total_tokens"]

    prompt, num_cached, num_before = run(main())

    assert f"<|assistant|>{ANSWER}<|end|><|user|>Result: Ann.<|end|>" in prompt
    assert num_cached >= num_before - 8


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {}, ""),
    ("/v1/chat/completions", {"enable_thinking": False}, "off"),
    ("/v1/chat/completions", {"enable_thinking": True}, "on"),
    ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, "off"),
    (
        "/v1/chat/completions",
        {"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False},
        "on",
    ),
    ("/v1/chat/completions", {"reasoning": {"enabled": False}}, "off"),
    ("/v1/chat/completions", {"reasoning": {"max_tokens": 0}}, "off"),
    ("/v1/chat/completions", {"reasoning": {"effort": "high"}}, "high"),
    ("/v1/chat/completions", {"reasoning_effort": "none"}, "off none"),
    ("/v1/chat/completions", {"reasoning_effort": "low"}, "low"),
    ("/v1/chat/completions", {"thinking": {"type": "disabled"}}, "off"),
    ("/v1/chat/completions", {"thinking": False}, "off"),
    ("/v1/responses", {"reasoning": {"effort": "low"}}, "low"),
    ("/v1/messages", {"thinking": {"type": "disabled"}}, "off"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "on"),
    ("/v1/messages", {"output_config": {"effort": "max"}}, "max"),
    (
        "/v1/messages",
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
        "off low",
    ),
]


def test_options_reach_the_template() -> None:
    """What clients say about thinking in any form becomes variables that the template mentions."""

    async def main() -> list[str]:
        bench, prompts = Thinker("Ann."), []
        async with bench.running():
            for path, options, _ in OPTIONS:
                body = {"model": "tiny", "max_tokens": 9, "messages": [QUESTION]}
                if path == "/v1/responses":
                    body = {"input": "Who lives in Rome?"}
                response = await bench.post(path, body | options)
                assert response.status == 200, response.body
                prompts.append(bench.prompt)
        return prompts

    for prompt, (_, options, wanted) in zip(run(main()), OPTIONS, strict=True):
        switch, *efforts = [*wanted.split(), ""][:2] if wanted else [""]
        efforts = [word for word in (switch, *efforts) if word not in ("on", "off", "")]
        assert prompt.endswith("<think></think>") == wanted.startswith("off"), options
        assert [word for word in ("none", "low", "high", "max") if f"|>{word}<|" in prompt] == (
            efforts
        ), options


# As DeepSeek V3.2's, whose user turn ends with the answer's header.
EARLY = THINKING_TEMPLATE.replace(
    "{{- '<|end|>' -}}\n{%- endfor -%}",
    "{{- '<|end|>' + ('<|assistant|><think>' if message.role == 'user' else '') -}}\n{%- endfor -%}",
).replace("{{- '<|assistant|>' -}}", "")
OPENING = THINKING_TEMPLATE.replace("{{- '<|assistant|>' -}}", "{{- '<|assistant|><think>' -}}")


@pytest.mark.parametrize(
    ("template", "question", "answer", "reasoning", "text"),
    [
        (OPENING, "Who?", "Hm.</think>Ann.", "Hm.", "Ann."),
        (OPENING, "Who?", "Hm.", "Hm.", ""),
        (EARLY, "Who is <think>?", "Hm.</think>Ann.", "Hm.", "Ann."),
        (THINKING_TEMPLATE, "What is <think>?", "Hm.", None, "Hm."),
    ],
)
def test_a_template_may_open_the_reasoning(
    template: str, question: str, answer: str, reasoning: str | None, text: str
) -> None:
    """An answer begins as reasoning if the template opened it, and not if the user wrote its mark."""

    async def main() -> Any:
        bench = Thinker(answer, template)
        async with bench.running():
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 99}
            return (await bench.post("/v1/chat/completions", body)).json

    message = run(main())["choices"][0]["message"]

    assert (message.get("reasoning_content"), message["content"]) == (reasoning, text)


def test_a_prefill_may_open_the_reasoning() -> None:
    """An answer that continues an open thought begins as reasoning."""
    prefill = {"role": "assistant", "content": "<think>Hm"}

    async def main() -> Any:
        bench = Thinker(". So.</think>Ann.")
        async with bench.running():
            body = {"messages": [QUESTION, prefill], "continue_final_message": True}
            return (await bench.post("/v1/chat/completions", body | {"max_tokens": 99})).json

    message = run(main())["choices"][0]["message"]

    assert (message["reasoning_content"], message["content"]) == (". So.", "Ann.")


def test_marks_that_are_special_tokens_delimit() -> None:
    """A special token that is a mark of the model's format reaches the parser, and no client."""
    bench = Thinker()
    encode = SERVICE.tokenizer.encode
    ids = [*encode("<|system|>", False), *letters("Hm."), *encode("<|user|>", False)]
    ids += [*letters("Ann."), bench._end]
    bench.device.next_token = lambda context: ids[len(context) - len(bench.core.live[0].prompt_ids)]
    marks = ReasoningMarks(("<|system|>",), ("<|user|>",))
    bench.service.output_format = replace(
        bench.service.output_format, reasoning=ReasoningFormat("special", marks)
    )

    async def main() -> Any:
        async with bench.running():
            body = {"messages": [QUESTION], "max_tokens": 99}
            return (await bench.post("/v1/chat/completions", body)).json

    message = run(main())["choices"][0]["message"]

    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Ann.")
