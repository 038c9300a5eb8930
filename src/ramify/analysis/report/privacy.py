"""A report without any text of the log: quotes, names of files and conversations are replaced.

A quote becomes its length and a digest. The key of the digests is random and not kept, so that nobody
can guess a short text and compare.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from ramify.analysis.report.document import (
    Analysis,
    PrefixLeader,
    PrefixNode,
    Session,
    TimelineRequest,
)
from ramify.analysis.report.figures.provenance import RULE_NOTE
from ramify.analysis.verdicts import Cause, Divergence, Example, Finding, Verdict

# Names in a path come from the body's keys; a path holds nothing else but indices.
_OWN_LABEL = re.compile(r"all requests|[\d,]+ small branch(es)?")
_ROLES = frozenset({"assistant", "developer", "system", "tool", "user"})
_WORD = re.compile(r"[a-z_]+(0\.1)?|no change|log \d+|\d{4}-\d\d-\d\d|\d{1,2}")
_PATH = re.compile(r"[A-Za-z_]{1,40}(\[[\d*]*\])?(\.[A-Za-z_]{1,40}(\[[\d*]*\])?)*")


class TextHider:
    """Replaces texts by digests that are equal for equal texts of this report only."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._file_names: dict[str, str] = {}

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

    def hide_lines(self, quality: Mapping[str, Any]) -> list[list[Any]]:
        """Bad lines with the names of their files replaced."""
        return [[self.hide_file(file), line] for file, line in quality.get("bad_lines", [])]

    def hide_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Tables of figures: texts and keys that are no plain lower-case words are replaced."""
        return {
            self._hide_text(name): self._hide_models(item)
            if name == "by_model"
            else self._hide_value(name, item)
            for name, item in values.items()
        }

    def _hide_models(self, models: Mapping[str, Any]) -> dict[str, Any]:
        """Even a plain word may be the name of a company's own model."""
        return {self.hide(name): self.hide_values(table) for name, table in models.items()}

    def _hide_value(self, name: str, value: object) -> Any:
        if isinstance(value, Mapping):
            return self.hide_values(value)
        if isinstance(value, list | tuple):
            return [self._hide_value(name, item) for item in value]
        if isinstance(value, str):
            if name == "file":
                return self.hide_file(value)
            return self.hide(value) if name == "model" else self._hide_text(value)
        return value

    def _hide_text(self, text: str) -> str:
        return text if _WORD.fullmatch(text) else self.hide(text)

    def keep_path(self, path: str) -> str:
        """A segment path; anything else is hidden."""
        return path if _PATH.fullmatch(path) or not path else self.hide(path)


def hide_texts(analysis: Analysis, changes: dict[str, str]) -> Analysis:
    """The analysis without a character of the log.

    Args:
        analysis: what to hide.
        changes: the advice by cause, in words that quote nothing.
    """
    hider = TextHider()
    lint = analysis.lint
    quality = hider.hide_values({**lint.quality, "bad_lines": hider.hide_lines(lint.quality)})
    quality.pop("bad_reasons", None)  # an error message may quote the line
    return replace(
        analysis,
        title="private",
        lint=replace(
            lint,
            findings=tuple(
                _hide_finding(hider, finding, changes.get(str(finding.cause), ""))
                for finding in lint.findings
            ),
            verdicts=tuple(_hide_verdict(hider, verdict) for verdict in lint.verdicts),
            quality=quality,
            tables=hider.hide_values(lint.tables),
        ),
        tree=tuple(_hide_node(hider, node) for node in analysis.tree),
        leaders_by_count=tuple(_hide_leader(hider, row) for row in analysis.leaders_by_count),
        leaders_by_tokens=tuple(_hide_leader(hider, row) for row in analysis.leaders_by_tokens),
        sessions=tuple(
            _hide_session(hider, session, number)
            for number, session in enumerate(analysis.sessions, 1)
        ),
        figures=tuple(each for each in analysis.figures if each.name != RULE_NOTE),
        is_private=True,
    )


def _hide_finding(hider: TextHider, finding: Finding, change: str) -> Finding:
    example = finding.example
    return replace(
        finding,
        segment=hider.keep_path(finding.segment),
        change=change,
        example=Example(
            line=example.line,
            had=hider.hide(example.had),
            got=hider.hide(example.got),
            file=hider.hide_file(example.file),
        ),
    )


def _hide_cause(hider: TextHider, cause: Cause) -> Cause:
    return replace(
        cause,
        segment=hider.keep_path(cause.segment),
        had=hider.hide(cause.had),
        got=hider.hide(cause.got),
    )


def _hide_verdict(hider: TextHider, verdict: Verdict) -> Verdict:
    divergence = verdict.divergence
    return replace(
        verdict,
        file=hider.hide_file(verdict.file),
        best_match_file=hider.hide_file(verdict.best_match_file or "") or None,
        divergence=None
        if divergence is None
        else Divergence(
            segment=hider.keep_path(divergence.segment),
            char=divergence.char,
            token=divergence.token,
            had=hider.hide(divergence.had),
            got=hider.hide(divergence.got),
        ),
        causes=tuple(_hide_cause(hider, cause) for cause in verdict.causes),
    )


def _hide_label(hider: TextHider, label: str) -> str:
    """A label keeps its paths; names of tools and the like behind them are hidden."""
    if not label or _OWN_LABEL.fullmatch(label):
        return label
    path, _, rest = label.partition(" ")
    if rest.strip("()") in _ROLES or _is_path(rest.removeprefix("… ")):
        return f"{hider.keep_path(path)} {rest}"
    return f"{hider.keep_path(path)} {hider.hide(rest)}".rstrip()


def _is_path(text: str) -> bool:
    return _PATH.fullmatch(text) is not None


def _hide_node(hider: TextHider, node: PrefixNode) -> PrefixNode:
    return replace(node, label=_hide_label(hider, node.label), text=hider.hide(node.text))


def _hide_leader(hider: TextHider, row: PrefixLeader) -> PrefixLeader:
    return replace(row, label=_hide_label(hider, row.label), text=hider.hide(row.text))


def _hide_session(hider: TextHider, session: Session, number: int) -> Session:
    return replace(
        session,
        name=f"conversation {number}",
        requests=tuple(_hide_timeline(hider, request) for request in session.requests),
    )


def _hide_timeline(hider: TextHider, request: TimelineRequest) -> TimelineRequest:
    return replace(
        request,
        file=hider.hide_file(request.file),
        segment=hider.keep_path(request.segment),
        had=hider.hide(request.had),
        got=hider.hide(request.got),
    )
