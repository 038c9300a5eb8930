"""Prompts in the shapes of APIs, and bodies cut into segments as the contract of `lint` has them.

A second implementation, independent of the analyser's. Stdlib only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.pure.analysis.planted_prompts import Message, Part, Prompt

Body = dict[str, Any]

SEGMENT_SETTINGS = frozenset(
    "model tool_choice response_format reasoning_effort reasoning verbosity text parallel_tool_calls "
    "service_tier thinking output_config output_format context_management speed enable_thinking "
    "chat_template_kwargs".split()
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment: `content` decides equality, `chars` is what `char` counts in."""

    path: str
    kind: str  # setting, tool, system, message
    content: str
    chars: str | None  # None: char is 0, as for settings and media
    role: str = ""


def compact(value: Any) -> str:
    """JSON as the contract counts in it: compact, keys in order, without `cache_control`."""
    return json.dumps(_unmarked(value), ensure_ascii=False, separators=(",", ":"))


def _unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unmarked(item) for key, item in value.items() if key != "cache_control"}
    return [_unmarked(item) for item in value] if isinstance(value, list) else value


def chat_body(prompt: Prompt) -> Body:
    """OpenAI chat completions."""
    texts = prompt.system
    system: Any = (
        texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    )
    body: Body = {
        "model": prompt.model,
        "messages": [{"role": "system", "content": system}, *map(_chat_message, prompt.messages)],
    }
    if prompt.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.schema,
                },
            }
            for tool in prompt.tools
        ]
    return _with_options(body, prompt)


def _with_options(body: Body, prompt: Prompt) -> Body:
    body |= prompt.settings
    if prompt.cache_key is not None:
        body["prompt_cache_key"] = prompt.cache_key
    if prompt.salt is not None:
        body["cache_salt"] = prompt.salt
    return body


def _chat_message(message: Message) -> Body:
    if message.role == "tool":
        (part,) = message.parts
        return {"role": "tool", "tool_call_id": part.call_id, "content": part.text}
    out: Body = {"role": message.role}
    texts = [part for part in message.parts if part.kind in {"text", "image"}]
    for part in message.parts:
        if part.kind == "thinking":
            out["reasoning_content"] = part.text
    if not texts:
        out["content"] = None
    elif len(texts) == 1 and texts[0].kind == "text":
        out["content"] = texts[0].text
    else:
        out["content"] = [
            {"type": "text", "text": part.text}
            if part.kind == "text"
            else {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{part.text}"}}
            for part in texts
        ]
    calls = [part for part in message.parts if part.kind == "call"]
    if calls:
        out["tool_calls"] = [
            {
                "id": part.call_id,
                "type": "function",
                "function": {
                    "name": part.name,
                    "arguments": json.dumps(part.arguments, ensure_ascii=False),
                },
            }
            for part in calls
        ]
    return out


def responses_body(prompt: Prompt) -> Body:
    """OpenAI Responses with the whole history in `input`."""
    items: list[Body] = []
    for message in prompt.messages:
        items.extend(_responses_items(message))
    body: Body = {"model": prompt.model, "instructions": "\n\n".join(prompt.system), "input": items}
    if prompt.tools:
        body["tools"] = [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.schema,
            }
            for tool in prompt.tools
        ]
    return _with_options(body, prompt)


def _responses_items(message: Message) -> Iterator[Body]:
    role = "developer" if message.role == "system" else message.role
    kind = "output_text" if role == "assistant" else "input_text"
    content: list[Body] = []
    for part in message.parts:
        if part.kind == "thinking":
            mark = hashlib.sha256(part.text.encode()).hexdigest()[:24]
            summary = [{"type": "summary_text", "text": part.text}]
            yield {"type": "reasoning", "id": f"rs_{mark}", "summary": summary}
        elif part.kind == "text":
            content.append({"type": kind, "text": part.text})
        elif part.kind == "image":
            content.append(
                {"type": "input_image", "image_url": f"data:image/png;base64,{part.text}"}
            )
    if content:
        yield {"type": "message", "role": role, "content": content}
    for part in message.parts:
        if part.kind == "call":
            yield {
                "type": "function_call", "call_id": part.call_id, "name": part.name,
                "arguments": json.dumps(part.arguments, ensure_ascii=False),
            }  # fmt: skip
        elif part.kind == "result":
            yield {"type": "function_call_output", "call_id": part.call_id, "output": part.text}


def anthropic_body(prompt: Prompt) -> Body:
    """Anthropic messages, with breakpoints at `prompt.marks`; a message without is a string if it can be."""
    mark = {"type": "ephemeral"} if prompt.ttl is None else {"type": "ephemeral", "ttl": prompt.ttl}
    system: Any = [{"type": "text", "text": text} for text in prompt.system]
    if "system" in prompt.marks:
        system[-1]["cache_control"] = mark
    elif len(system) == 1:
        system = prompt.system[0]
    messages: list[Body] = []
    for message in prompt.messages:
        role = "user" if message.role == "tool" else message.role
        blocks = [_anthropic_block(part) for part in message.parts]
        if (
            messages
            and message.role == "tool"
            and messages[-1]["content"][-1]["type"] == "tool_result"
        ):
            messages[-1]["content"].extend(blocks)
        else:
            messages.append({"role": role, "content": blocks})
    for at, sent in enumerate(messages):
        last = at == len(messages) - 1
        if (last and "last" in prompt.marks) or str(at) in prompt.marks:
            sent["content"][-1]["cache_control"] = mark
        elif len(sent["content"]) == 1 and sent["content"][0]["type"] == "text":
            sent["content"] = sent["content"][0]["text"]
    body: Body = {"model": prompt.model, "max_tokens": 2048, "system": system, "messages": messages}
    if prompt.tools:
        body["tools"] = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.schema}
            for tool in prompt.tools
        ]
        if "tools" in prompt.marks:
            body["tools"][-1]["cache_control"] = mark
    return body | prompt.settings


def _anthropic_block(part: Part) -> Body:
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if part.kind == "thinking":
        signature = hashlib.sha256(part.text.encode()).hexdigest()
        return {"type": "thinking", "thinking": part.text, "signature": signature}
    if part.kind == "image":
        return {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": part.text},
        }
    if part.kind == "call":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": part.arguments}
    return {"type": "tool_result", "tool_use_id": part.call_id, "content": part.text}


def otlp_fields(prompt: Prompt) -> Body:
    """The values of the GenAI attributes that hold a prompt."""
    messages = [
        {"role": message.role, "parts": [_otlp_part(part) for part in message.parts]}
        for message in prompt.messages
    ]
    fields: Body = {
        "gen_ai.request.model": prompt.model,
        "gen_ai.system_instructions": [{"type": "text", "content": text} for text in prompt.system],
        "gen_ai.input.messages": messages,
    }
    if prompt.tools:
        fields["gen_ai.tool.definitions"] = [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.schema,
            }
            for tool in prompt.tools
        ]
    return fields


def _otlp_part(part: Part) -> Body:
    if part.kind == "text":
        return {"type": "text", "content": part.text}
    if part.kind == "thinking":
        return {"type": "reasoning", "content": part.text}
    if part.kind == "image":
        return {"type": "blob", "modality": "image", "mime_type": "image/png", "content": part.text}
    if part.kind == "call":
        return {
            "type": "tool_call",
            "id": part.call_id,
            "name": part.name,
            "arguments": part.arguments,
        }
    return {"type": "tool_call_response", "id": part.call_id, "response": part.text}


def pieces_of(body: Body) -> list[Piece]:
    """Segments of a body of any of these shapes, in the order of the prompt."""
    if "gen_ai.request.model" in body:
        return _otlp_pieces(body)
    pieces = [Piece("settings.model", "setting", body["model"], None)]
    for name in sorted(SEGMENT_SETTINGS & body.keys() - {"model"}):
        pieces.append(Piece(f"settings.{name}", "setting", compact(body[name]), None))
    for at, tool in enumerate(body.get("tools", ())):
        pieces.append(Piece(f"tools[{at}]", "tool", compact(tool), compact(tool)))
    system: Any = body.get("system", body.get("instructions"))
    if isinstance(system, str):
        pieces.append(Piece("system", "system", system, system))
    else:
        for at, block in enumerate(system or ()):
            pieces.append(Piece(f"system[{at}]", "system", block["text"], block["text"]))
    messages: list[Body] = body["messages"] if "messages" in body else body["input"]
    for at, message in enumerate(messages):
        pieces.extend(_message_pieces(message, f"messages[{at}]"))
    return pieces


def _message_pieces(message: Body, path: str) -> Iterator[Piece]:
    role: str = message.get("role") or message.get("type") or ""
    if "role" not in message:  # an item of Responses
        if message["type"] == "function_call_output":
            role = f"{role} {message['call_id']}"
            yield Piece(path, "message", message["output"], message["output"], role)
        else:
            yield Piece(path, "message", compact(message), compact(message), role)
        return
    if "tool_call_id" in message:
        role = f"{role} {message['tool_call_id']}"
    if "reasoning_content" in message:
        thought = message["reasoning_content"]
        yield Piece(f"{path}.reasoning_content", "message", f"thought {thought}", thought, role)
    content = message.get("content")
    if isinstance(content, str):
        yield Piece(path, "message", content, content, role)
    else:
        for at, block in enumerate(content or ()):
            yield _block_piece(block, f"{path}.content[{at}]", role)
    for at, call in enumerate(message.get("tool_calls", ())):
        yield Piece(f"{path}.tool_calls[{at}]", "message", compact(call), compact(call), role)


def _block_piece(block: Body, path: str, role: str) -> Piece:
    kind = block["type"]
    if kind in {"text", "input_text", "output_text"}:
        return Piece(path, "message", block["text"], block["text"], role)
    if kind == "thinking":
        return Piece(path, "message", f"thought {block['thinking']}", block["thinking"], role)
    if kind in {"image", "image_url", "input_image"}:
        return Piece(path, "message", compact(block), None, role)
    if kind == "tool_result" and isinstance(block["content"], str):
        return Piece(
            path, "message", block["content"], block["content"], f"{role} {block['tool_use_id']}"
        )
    return Piece(path, "message", compact(block), compact(block), role)


def _otlp_pieces(fields: Body) -> list[Piece]:
    pieces = [Piece("settings.model", "setting", fields["gen_ai.request.model"], None)]
    for at, tool in enumerate(fields.get("gen_ai.tool.definitions", ())):
        pieces.append(Piece(f"tools[{at}]", "tool", compact(tool), compact(tool)))
    for at, block in enumerate(fields["gen_ai.system_instructions"]):
        pieces.append(Piece(f"system[{at}]", "system", block["content"], block["content"]))
    for at, message in enumerate(fields["gen_ai.input.messages"]):
        for number, part in enumerate(message["parts"]):
            path, role = f"messages[{at}].content[{number}]", message["role"]
            if part["type"] == "text":
                pieces.append(Piece(path, "message", part["content"], part["content"], role))
            elif part["type"] == "reasoning":
                thought = part["content"]
                pieces.append(Piece(path, "message", f"thought {thought}", thought, role))
            elif part["type"] == "tool_call_response" and isinstance(part["response"], str):
                answer = part["response"]
                pieces.append(Piece(path, "message", answer, answer, f"{role} {part['id']}"))
            elif part["type"] == "blob":
                pieces.append(Piece(path, "message", compact(part), None, role))
            else:
                pieces.append(Piece(path, "message", compact(part), compact(part), role))
    return pieces
