"""Dialogues with a server of each family's template: its own calls come back, with their results."""

from __future__ import annotations

from typing import Any

from tests.cpu.family_templates import FAMILY_TEMPLATES, FamilyTemplate
from tests.pure.golden_recorder import Dialogue, DialogueGroup, Exchange, earlier, spread
from tests.pure.tool_loop import KIMI, SCHEMA, tokenizer_of

SYSTEM, QUESTION, NEXT = "Be brief.", "Who lives in Rome?", "And where?"
FUNCTION = {"name": "find", "description": "Who lives there."}
RESULT, FINAL = "Ann.", "Ann does."
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
# Families whose answers are streamed as well, each in a single API.
STREAMED = {
    CHAT: ("llama", "mistral_v13", "deepseek_v31", "kimi_k2_thinking"),
    MESSAGES: ("qwen3", "gemma3", "deepseek_v32"),
    RESPONSES: ("gpt_oss", "glm4_moe"),
}


def chat_body(family: FamilyTemplate, *messages: Any) -> dict[str, Any]:
    """A chat request with the family's options."""
    body: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION},
            *messages,
        ],
        "tools": [{"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}}],
        "max_tokens": 200,
    }
    return body | ({"chat_template_kwargs": dict(family.options)} if family.options else {})


def messages_body(family: FamilyTemplate, *messages: Any) -> dict[str, Any]:
    """A request of the Messages API."""
    body = {
        "model": "tiny",
        "system": SYSTEM,
        "messages": [{"role": "user", "content": QUESTION}, *messages],
        "tools": [{**FUNCTION, "input_schema": SCHEMA}],
        "max_tokens": 200,
    }
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    return body | (thinking if family.options else {})


def responses_body(family: FamilyTemplate, *items: Any) -> dict[str, Any]:
    """A request of the Responses API."""
    body = {
        "instructions": SYSTEM,
        "input": [{"role": "user", "content": QUESTION}, *items],
        "tools": [{"type": "function", **FUNCTION, "parameters": SCHEMA, "strict": False}],
        "max_output_tokens": 200,
    }
    return body | ({"reasoning": {"effort": "medium"}} if family.options else {})


def chat_dialogue(family: FamilyTemplate) -> Dialogue:
    """A call, its result, and a question after the answer."""
    message = ("choices", 0, "message")
    call_id = earlier(0, *message, "tool_calls", 0, "id")
    turns = [
        earlier(0, *message),
        {"role": "tool", "tool_call_id": call_id, "content": RESULT},
        earlier(1, *message),
        {"role": "user", "content": NEXT},
    ]
    bodies = [chat_body(family, *turns[:length]) for length in (0, 2, 4)]
    last = bodies[2] | {"tool_choice": "none"}
    return Dialogue(
        f"{family.name} chat",
        (
            Exchange(CHAT, bodies[0], family.answer),
            Exchange(CHAT, bodies[1], FINAL),
            Exchange(CHAT, last, FINAL),
        ),
    )


def messages_dialogue(family: FamilyTemplate) -> Dialogue:
    """A call and its result, counted before it is answered."""
    turns = [
        {"role": "assistant", "content": earlier(0, "content")},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": earlier(0, "content", -1, "id"),
                    "content": [{"type": "text", "text": RESULT}],
                }
            ],
        },
    ]
    first, second = messages_body(family), messages_body(family, *turns)
    return Dialogue(
        f"{family.name} messages",
        (
            Exchange(MESSAGES, first, family.answer),
            Exchange(f"{MESSAGES}/count_tokens", second),
            Exchange(MESSAGES, second, FINAL),
        ),
    )


def responses_dialogue(family: FamilyTemplate) -> Dialogue:
    """A call and its result, with all items and with the response's id."""
    output = {
        "type": "function_call_output",
        "call_id": earlier(0, "output", -1, "call_id"),
        "output": RESULT,
    }
    short = responses_body(family) | {
        "input": [output],
        "previous_response_id": earlier(0, "id"),
    }
    return Dialogue(
        f"{family.name} responses",
        (
            Exchange(RESPONSES, responses_body(family), family.answer),
            Exchange(RESPONSES, responses_body(family, spread(0, "output"), output), FINAL),
            Exchange(RESPONSES, short, FINAL),
        ),
    )


def streamed_dialogues(family: FamilyTemplate) -> list[Dialogue]:
    """The first answer as a stream, in the API of `STREAMED`."""
    bodies = {CHAT: chat_body, MESSAGES: messages_body, RESPONSES: responses_body}
    return [
        Dialogue(
            f"{family.name} stream",
            (Exchange(path, bodies[path](family) | {"stream": True}, family.answer),),
        )
        for path, names in STREAMED.items()
        if family.name in names
    ]


def family_group(family: FamilyTemplate) -> DialogueGroup:
    """All dialogues with a server of a family."""
    dialogues = [
        chat_dialogue(family),
        messages_dialogue(family),
        responses_dialogue(family),
        *streamed_dialogues(family),
    ]
    options = {"tokenizer": tokenizer_of(family.name), "max_model_len": 4096}
    return DialogueGroup("families", dialogues, options)


# Those whose templates and answers have a form of their own.
NAMES = frozenset(
    "llama mistral_v3 mistral_v13 qwen3 qwen3_coder gemma2 gemma3 phi4_mini granite33 smollm3 glm4 "
    "glm4_moe command_r7b seed_oss deepseek_v3 deepseek_r1 deepseek_v31 deepseek_v32 gpt_oss".split()
)
GROUPS = [
    family_group(family)
    for family in (*FAMILY_TEMPLATES, KIMI)
    if family.name in NAMES or family is KIMI
]
