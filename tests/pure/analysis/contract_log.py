"""Tiny logs of chat bodies for clauses of the contract of `lint`, and what it says about them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ramify.analysis import lint
from ramify.analysis.lint_json import report_as_json

WORDS = (
    "river stone market quiet running careful silver orange window bridge teacher simple".split()
)
RULES = " ".join(
    f"Rule {i}: {WORDS[i % 12]} {WORDS[i * 5 % 12]} before the {WORDS[i * 7 % 11]}."
    for i in range(90)
)
MORE = " ".join(
    f"Note {i}: {WORDS[i * 3 % 12]} and {WORDS[i * 5 % 11]} after {WORDS[i % 7]}."
    for i in range(90)
)

Json = dict[str, Any]


def message(role: str, content: Any, **more: Any) -> Json:
    """A message of a chat body."""
    return {"role": role, "content": content, **more}


def chat(*messages: Json, model: str = "gpt-4o", **more: Any) -> Json:
    """A body for chat completions."""
    return {"model": model, "messages": list(messages), **more}


SYSTEM = message("system", RULES)
QUESTION = message("user", "Please answer the question about the river market.")
LATER = (message("assistant", "Yes."), message("user", "And more?"))
TALK = (
    message("user", "First question about tides?"),
    message("assistant", f"The tides come twice a day. {MORE[:300]}"),
    message("user", "Second question about ships?"),
    message("assistant", f"Ships float on water always. {MORE[300:600]}"),
    message("user", "Third question about ports?"),
    message("assistant", f"Ports are by the sea mostly. {MORE[600:900]}"),
    message("user", "Fourth?"),
)


def lint_rows(folder: Path, rows: Sequence[Any], **options: Any) -> Json:
    """The JSON of `lint` about a file with a line for each row; a string is a line as it is."""
    path = folder / "log.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return report_as_json(lint(path, **options))


def verdicts(folder: Path, *rows: Any, **options: Any) -> list[Json]:
    """The verdicts of a log, in order."""
    in_order: list[Json] = lint_rows(folder, rows, **options)["verdicts"]
    return in_order


def system_verdicts(folder: Path, *systems: str) -> list[Json]:
    """Verdicts of requests that differ in the system prompt and in the question."""
    return verdicts(
        folder,
        *(
            chat(message("system", text), message("user", f"Please answer question {number}."))
            for number, text in enumerate(systems)
        ),
    )


def causes(verdict: Json) -> list[str]:
    """Names of a verdict's causes."""
    return [cause["cause"] for cause in verdict["causes"]]


def only(verdict: Json) -> list[tuple[str, str, str]]:
    """Cause, certainty and segment."""
    return [(item["cause"], item["certainty"], item["segment"]) for item in verdict["causes"]]
