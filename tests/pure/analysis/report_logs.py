"""Small logs with planted causes for the tests of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HANDBOOK = " ".join(f"Rule {number}: answer briefly and name the source." for number in range(300))


def chat_row(number: int, *, system: str, question: str) -> dict[str, Any]:
    """A body of a chat with the response beside it."""
    return {
        "timestamp": f"2026-11-20T10:{number // 2:02d}:{30 * (number % 2):02d}Z",
        "request": {
            "model": "gpt-4.1",
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ],
        },
        "response": {
            "id": f"r{number}",
            "model": "gpt-4.1",
            "usage": {
                "prompt_tokens": 3000,
                "completion_tokens": 10,
                "total_tokens": 3010,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        },
    }


def write_clock_log(path: Path, *, num_requests: int = 12, name: str = "Ada") -> Path:
    """Requests whose system prompt begins with the time, so that they share nothing."""
    rows = [
        chat_row(
            number,
            system=f"Now: 2026-11-20 10:{number:02d}:17. You help {name}.\n{HANDBOOK}",
            question=f"Question {number} about chapter {number}?",
        )
        for number in range(num_requests)
    ]
    return write_rows(path, rows)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
