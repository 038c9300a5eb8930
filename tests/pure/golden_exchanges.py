"""The recorded exchanges over the server's four APIs, and its OpenAPI document.

`python -m tests.pure.golden_exchanges`, from the repository root, records them anew, in
`tests/pure/golden`. What then differs in git is what a user of the server sees.
"""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ramify import __version__
from ramify.server.routes import ENDPOINTS, openapi_document
from tests.pure import (
    golden_chat,
    golden_families,
    golden_messages,
    golden_ollama,
    golden_responses,
    golden_servers,
)
from tests.pure.golden_recorder import DialogueGroup, Recorder, as_json, split_recording

FOLDER = Path(__file__).parent / "golden"
OPENAPI = FOLDER / "openapi.jsonl"
GROUPS: Mapping[str, Sequence[DialogueGroup]] = {
    "chat": [golden_chat.GROUP],
    "messages": [golden_messages.GROUP],
    "responses": [golden_responses.GROUP],
    "ollama": [golden_ollama.GROUP],
    "servers": golden_servers.GROUPS,
    "families": golden_families.GROUPS,
}
MAX_SHOWN_DIALOGUES, MAX_SHOWN_LINES = 5, 40  # of a difference


def played(name: str) -> dict[str, list[str]]:
    """The lines of each dialogue of a file, as the server answers."""
    lines: dict[str, list[str]] = {}
    for group in GROUPS[name]:
        lines |= asyncio.run(Recorder(group).recordings())
    return lines


def recorded(name: str) -> dict[str, list[str]]:
    """The lines of each dialogue of a file, as they are recorded."""
    return dict(split_recording(path_of(name).read_text(encoding="utf-8")))


def path_of(name: str) -> Path:
    """The file of a name of `GROUPS`."""
    return FOLDER / f"{name}.jsonl"


def openapi_lines() -> list[str]:
    """The OpenAPI document, without the version: a line for each path, each schema, and the rest."""
    document = openapi_document(ENDPOINTS)
    assert document["info"]["version"] == __version__
    document["info"]["version"] = "VERSION"
    paths, schemas = document.pop("paths"), document["components"].pop("schemas")
    parts = [("path", paths), ("schema", schemas), ("document", document)]
    return [as_json({kind: name, "is": part[name]}) for kind, part in parts for name in part]


def pretty(line: str) -> list[str]:
    """A recorded line in the lines of a difference."""
    return json.dumps(json.loads(line), ensure_ascii=False, indent=1).split("\n")


def difference(before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]) -> str:
    """The dialogues that differ, the first of them line by line; empty if none does."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    shown = []
    for name in names[:MAX_SHOWN_DIALOGUES]:
        old, new = (
            [text for line in side.get(name, ()) for text in pretty(line)]
            for side in (before, after)
        )
        lines = list(difflib.unified_diff(old, new, "recorded", "played", n=4, lineterm=""))
        more = len(lines) - MAX_SHOWN_LINES
        lines[MAX_SHOWN_LINES:] = [f"… and {more} lines more"] if more > 0 else []
        # Equal values in other text: the order of fields, or how a character is escaped.
        lines = lines or [*before[name], "---", *after[name]]
        shown.append("\n".join([f"dialogue {name!r}:", *lines]))
    if len(names) > len(shown):
        shown.append("these differ as well: " + ", ".join(names[MAX_SHOWN_DIALOGUES:]))
    return "\n\n".join(shown)


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write a file."""
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def record() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for name in GROUPS:
        lines = [line for dialogue in played(name).values() for line in dialogue]
        write_lines(path_of(name), lines)
    write_lines(OPENAPI, openapi_lines())


if __name__ == "__main__":
    record()
