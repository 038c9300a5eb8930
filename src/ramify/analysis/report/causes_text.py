"""What each cause means, in a sentence, and which checks a log has passed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ramify.analysis.verdicts import CauseName, Finding


@dataclass(frozen=True, slots=True)
class CauseText:
    """A cause for readers."""

    icon: str  # one or two characters, beside the name and never instead of it
    title: str
    passed: str  # said if a log has no such finding


CAUSES: dict[CauseName, CauseText] = {
    CauseName.CLOCK: CauseText("◷", "A date or time changes", "No clock in a shared prefix"),
    CauseName.RANDOM_ID: CauseText("#", "An id changes", "No random id in a shared prefix"),
    CauseName.PATH_OR_STATE: CauseText("/", "A path or status changes", "No path or status block"),
    CauseName.BILLING_HEADER: CauseText("$", "A billing header changes", "No billing header"),
    CauseName.TOOL_ORDER: CauseText("⇅", "Tools change their order", "Tools keep their order"),
    CauseName.TOOL_CHANGED: CauseText("±", "Tools are added or edited", "Tools stay the same"),
    CauseName.KEY_ORDER: CauseText("{}", "JSON keys change their order", "JSON keys keep order"),
    CauseName.WHITESPACE: CauseText("␣", "White space or form changes", "Equal text, equal bytes"),
    CauseName.SETTINGS_CHANGED: CauseText("⚙", "A setting changes", "Settings stay the same"),
    CauseName.MEDIA_CHANGED: CauseText("▣", "Images or files change", "Media stay the same"),
    CauseName.HISTORY_EDITED: CauseText("✎", "History is edited", "History is only appended to"),
    CauseName.COMPACTION: CauseText("⇲", "A summary replaces the history", "No compaction"),
    CauseName.REASONING_DROPPED: CauseText("∅", "Reasoning is dropped", "Reasoning is sent back"),
    CauseName.CONTEXT_MOVED: CauseText("→", "A context block moves", "Context blocks stay put"),
    CauseName.SYSTEM_HOISTED: CauseText("↑", "A system message is hoisted", "No hoisted message"),
    CauseName.BREAKPOINT_MISSING: CauseText("¶", "No cache breakpoint", "Breakpoints are in place"),
    CauseName.LOOKBACK_EXCEEDED: CauseText("20", "Out of the look-back", "Within the look-back"),
    CauseName.BELOW_MINIMUM: CauseText("<", "Below the minimum", "Prefixes are long enough"),
    CauseName.TTL_EXPIRED: CauseText("⌛", "The entry has expired", "Entries are read in time"),
    CauseName.PARALLEL_COLD: CauseText(
        "∥", "Sent before the first write", "No cold parallel start"
    ),
    CauseName.MODEL_CHANGED: CauseText("M", "The model changes", "Conversations keep their model"),
    CauseName.ROUTING: CauseText("⤳", "Another replica answers", "Requests reach their replica"),
    CauseName.CACHE_KEY_SCATTERED: CauseText("⚿", "Several cache keys", "One key a prefix"),
    CauseName.EVICTED: CauseText("✕", "The entry was evicted", "No eviction seen"),
    CauseName.NAMESPACE_SPLIT: CauseText("⫽", "Separate namespaces", "No split namespaces"),
    CauseName.UNREAD_WRITE: CauseText("✍", "Written, never read", "Every paid write is read"),
    CauseName.NEW_CONTENT: CauseText("+", "New content", ""),
    CauseName.OUTSIDE_PROMPT: CauseText("?", "Outside the prompt", "No miss without a reason"),
}


def passed_checks(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Name and sentence of each cause that no finding has."""
    found = {finding.cause for finding in findings}
    return [
        (str(cause), text.passed)
        for cause, text in CAUSES.items()
        if cause not in found and text.passed
    ]
