"""Bodies in the shape of Claude Code's and Codex's requests, sent as they are."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from report import MODEL, SCRIPTED_URL, case

EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
COMMAND = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}},
                   "workdir": {"type": "string"}, "timeout_ms": {"type": "number"}},
    "required": ["command"], "additionalProperties": False,
}  # fmt: skip
GRAMMAR = 'start: "*** Begin Patch" LF /(.|\\n)*/ "*** End Patch"\nLF: "\\n"'


def post(path: str, body: dict[str, Any], **headers: str) -> tuple[list[dict[str, Any]], str]:
    """Post a streaming request; returns its events and the warning header."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    request = urllib.request.Request(
        f"{SCRIPTED_URL}{path}", json.dumps(body).encode(), headers, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        lines = [line.decode() for line in response]
        warning = response.headers.get("X-Ramify-Warning", "")
    data = [line[6:] for line in lines if line.startswith("data: ") and "[DONE]" not in line]
    return [json.loads(line) for line in data], warning


def codex(items: list[dict[str, Any]]) -> dict[str, Any]:
    """A body as Codex sends it."""
    return {
        "model": MODEL, "instructions": "You are a coding agent.", "input": items,
        "tools": [
            {"type": "function", "name": "shell", "description": "Run a command.", "strict": False,
             "parameters": COMMAND},
            {"type": "custom", "name": "apply_patch", "description": "Edit files.",
             "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR}},
            {"type": "web_search", "external_web_access": False},
            {"type": "function", "name": "update_plan", "parameters": EMPTY, "strict": False},
        ],
        "tool_choice": "auto", "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199-session",
        "text": {"verbosity": "low"}, "service_tier": "auto",
    }  # fmt: skip


def message(role: str, text: str) -> dict[str, Any]:
    """A message item."""
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


@case("Codex: first turn calls a tool")
def _() -> str:
    items = [message("developer", "<permissions>none</permissions>"),
             message("user", "<environment_context/>"), message("user", "List the files.")]  # fmt: skip
    events, warning = post("/v1/responses", codex(items))
    assert events[-1]["type"] == "response.completed", events[-1]
    output = events[-1]["response"]["output"]
    assert output[-1]["type"] == "function_call", output
    assert output[-1]["name"] == "shell"
    return warning


@case("Codex: a later turn with its own and foreign items")
def _() -> str:
    items = [
        message("user", "List the files."),
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA", "content": None},
        {"type": "function_call", "name": "shell", "call_id": "c1",
         "arguments": '{"command": ["ls"]}'},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py\nb.py"},
        {"type": "custom_tool_call", "name": "apply_patch", "call_id": "c2", "status": "completed",
         "input": "*** Begin Patch\n*** End Patch"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed",
         "action": {"type": "search", "query": "x"}},
    ]  # fmt: skip
    events, warning = post("/v1/responses", codex(items))
    output = events[-1]["response"]["output"]
    assert "done" in output[-1]["content"][0]["text"], output
    return warning


def claude_code(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """A body as Claude Code sends it."""
    tools = [
        {"name": name, "description": f"{name}.", "input_schema": COMMAND}
        for name in ("Bash", "Read", "Edit", "mcp__files:list/all", "Task")
    ]
    cache = {"type": "ephemeral"}
    return {
        "model": MODEL, "max_tokens": 32000, "stream": True, "messages": messages,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"},
            {"type": "text", "text": "You are Claude Code.", "cache_control": cache},
            {"type": "text", "text": "Be brief. " * 50, "cache_control": cache | {"ttl": "1h"}},
        ],
        "tools": [*tools, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
    }  # fmt: skip


@case("Claude Code: first turn calls a tool")
def _() -> str:
    block = {"type": "text", "text": "List the files.", "cache_control": {"type": "ephemeral"}}
    events, warning = post(
        "/v1/messages?beta=true", claude_code([{"role": "user", "content": [block]}]),
        anthropic_version="2023-06-01", anthropic_beta="claude-code-20250219",
    )  # fmt: skip
    names = [event["type"] for event in events]
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts[-1]["type"] == "tool_use", starts
    return warning


@case("Claude Code: a later turn with an image, a document and thinking")
def _() -> str:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    messages = [
        {"role": "user", "content": "List the files."},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "They want files.", "signature": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": ["ls"]}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1",
             "content": [{"type": "text", "text": "a.py b.py"}, image]},
        ]},
    ]  # fmt: skip
    events, warning = post("/v1/messages", claude_code(messages), anthropic_version="2023-06-01")
    text = "".join(
        event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"
    )
    assert "a.py" in text, events
    return warning
