"""A report without any text of the log: quotes, names of files and conversations are replaced.

A quote becomes its length and a digest. The key of the digests is random and not kept, so that nobody
can guess a short text and compare.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from ramify.analysis.findings import CHANGES
from ramify.analysis.report.document import Analysis
from ramify.analysis.report.figures.quality_warnings import warnings_of
from ramify.analysis.verdicts import Finding

_WORD = re.compile(r"[a-z_]+(0\.1)?|\d{1,2}")
# Names in a path come from the body's keys; a path holds nothing else but indices.
_PATH = re.compile(r"[A-Za-z_]{1,40}(\[[\d*]*\])?(\.[A-Za-z_]{1,40}(\[[\d*]*\])?)*")
_OWN_LABEL = re.compile(r"all requests|[\d,]+ small branch(es)?|blocks? [\d-]+")


class TextHider:
    """Replaces texts by digests that are equal for equal texts of this report only."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._file_names: dict[str, str] = {}
        self._hide_by_field: dict[str, Callable[[Any], Any]] = {
            "had": self.hide,
            "got": self.hide,
            "text": self.hide,
            "label": self.hide_label,
            "segment": self.hide_path,
            "file": self.hide_file,
            "best_match_file": self.hide_file,
        }

    def hide(self, text: str) -> str:
        """Length and digest of a text; empty stays empty."""
        if not text:
            return ""
        raw = text.encode("utf-8", "surrogatepass")
        digest = blake2b(raw, digest_size=4, key=self._key).hexdigest()
        return f"‹{len(text)} characters, {digest}›"

    def hide_file(self, name: str) -> str:
        """`log 1`, `log 2` in order of appearance."""
        if not name:
            return ""
        return self._file_names.setdefault(name, f"log {len(self._file_names) + 1}")

    def hide_path(self, path: str) -> str:
        """A segment path stays; anything else is hidden."""
        return path if _PATH.fullmatch(path) or not path else self.hide(path)

    def hide_label(self, label: str) -> str:
        """A label of our own, or the first and the last path of a part; anything else is hidden."""
        if _OWN_LABEL.fullmatch(label):
            return label
        return " … ".join(map(self.hide_path, label.split(" … ")))

    def hide_fields(self, value: Any) -> Any:
        """A dataclass of the report, or a tuple of them, with texts, paths and names of files hidden."""
        if isinstance(value, tuple):
            return tuple(map(self.hide_fields, value))
        hidden = {}
        for name in getattr(value, "__dataclass_fields__", ()):  # without the cost of `fields`
            item = getattr(value, name)
            new = None if item is None else self._hide_by_field.get(name, self.hide_fields)(item)
            if new is not item:
                hidden[name] = new
        return replace(value, **hidden) if hidden else value


def figures_only(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of figures without texts, lists and keys that are no plain lower-case words.

    Even a plain word may be the name of a company's own model: tables by model are left out.
    """
    return {
        name: figures_only(item) if isinstance(item, Mapping) else item
        for name, item in values.items()
        if _WORD.fullmatch(name) and name != "by_model" and not isinstance(item, str | list | tuple)
    }


def hide_texts(analysis: Analysis) -> Analysis:
    """The analysis without a character of the log; the advice is in words that quote nothing."""
    hider = TextHider()
    lint = analysis.lint

    def hidden(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        return tuple(
            replace(hider.hide_fields(item), change=CHANGES[item.cause]) for item in findings
        )

    lines = {
        name: [[hider.hide_file(file), line] for file, line in lint.quality.get(name, ())]
        for name in ("bad_lines", "lines_without_tokens")
    }
    quality = figures_only(lint.quality) | lines
    # Notes of rules, and the rules of models, name the models.
    tables, rules = figures_only(lint.tables), lint.tables.get("rules", {})
    tables["rules"] = {name: rules.get(name) for name in ("date", "sources", "providers")}
    quality.pop("bad_reasons", None)  # an error message may quote the line
    return replace(
        analysis,
        title="private",
        lint=replace(
            lint,
            findings=hidden(lint.findings),
            observations=hidden(lint.observations),
            verdicts=hider.hide_fields(lint.verdicts),
            quality=quality,
            tables=tables,
        ),
        tree=hider.hide_fields(analysis.tree),
        sessions=tuple(
            replace(hider.hide_fields(session), name=f"conversation {number}")
            for number, session in enumerate(analysis.sessions, 1)
        ),
        warnings=tuple(warnings_of(quality, lint, is_partial=analysis.is_partial)),
        is_private=True,
    )
