"""Transcripts of Claude Code for the tests, in the shape that the program writes."""

from __future__ import annotations

from typing import Any

SESSION = "2b9d8116-e1de-4038-a101-5fd575fdcb0e"


class Transcript:
    """Writes lines of a session; a second apart."""

    def __init__(self, session: str = SESSION) -> None:
        self.session = session
        self.lines: list[dict[str, Any]] = []

    def line(self, kind: str, parent: str | None, **fields: Any) -> str:
        """Append a line; returns its uuid."""
        number = len(self.lines)
        uuid = fields.pop("uuid", f"{self.session[:8]}-{number:04}")
        self.lines.append(
            {
                "parentUuid": parent,
                "isSidechain": False,
                "userType": "external",
                "cwd": "/work",
                "sessionId": self.session,
                "version": "2.1.220",
                "type": kind,
                "uuid": uuid,
                "timestamp": f"2026-08-01T04:{number // 60:02}:{number % 60:02}.000Z",
            }
            | fields
        )
        return str(uuid)

    def user(self, parent: str | None, content: Any, **fields: Any) -> str:
        """A line of the user."""
        return self.line("user", parent, message={"role": "user", "content": content}, **fields)

    def result(self, parent: str, call: str, content: Any = "done") -> str:
        """A line with the result of a tool call."""
        block = {"type": "tool_result", "tool_use_id": call, "content": content}
        return self.user(parent, [block])

    def answer(
        self, parent: str | None, message_id: str, *blocks: dict[str, Any], **fields: Any
    ) -> str:
        """A response, a line for each block; returns the uuid of its last line."""
        usage = fields.pop("usage", None) or {
            "input_tokens": 2,
            "cache_creation_input_tokens": 300,
            "cache_read_input_tokens": 9000,
            "cache_creation": {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200},
            "service_tier": "standard",
        }
        extra = fields.pop("message", {})
        model = fields.pop("model", "claude-opus-5")
        stop = fields.pop("stop", "end_turn")
        for number, block in enumerate(blocks, 1):
            message = {
                "model": model,
                "id": message_id,
                "type": "message",
                "role": "assistant",
                "content": [block],
                "stop_reason": stop if number == len(blocks) else None,
                "usage": usage | {"output_tokens": 40 if number == len(blocks) else 1},
                "diagnostics": None,
            }
            parent = self.line(
                "assistant",
                parent,
                message=message | extra,
                requestId=f"req_{message_id}",
                **fields,
            )
        assert parent is not None
        return parent


def text(value: str) -> dict[str, Any]:
    """A block of text."""
    return {"type": "text", "text": value}


def call(call_id: str, **arguments: Any) -> dict[str, Any]:
    """A block that calls a tool."""
    return {"type": "tool_use", "id": call_id, "name": "Bash", "input": arguments}
