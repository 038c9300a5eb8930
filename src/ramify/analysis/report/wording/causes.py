"""Causes of lost hits in words: a title, what happens, and what a log must have to show it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ramify.analysis.verdicts import CauseName, Finding

Evidence = Literal["texts", "times", "cached tokens", ""]
_COUNTS: dict[Evidence, str] = {
    "texts": "num_with_text",
    "times": "num_with_times",
    "cached tokens": "num_with_reads",
}


@dataclass(frozen=True, slots=True)
class CauseText:
    """What a reader needs to know about a cause."""

    title: str
    what: str  # happens, and why the cache cannot read past it
    evidence: Evidence = "texts"  # without which a log cannot show it; empty: every log can


CAUSES: dict[CauseName, CauseText] = {
    CauseName.CLOCK: CauseText(
        "A clock in the prompt",
        "A date or time is rendered inside the prompt; everything after it differs each time.",
    ),
    CauseName.RANDOM_ID: CauseText(
        "A random id in the prompt",
        "An id is drawn anew for each request or session; everything after it differs.",
    ),
    CauseName.PATH_OR_STATE: CauseText(
        "A path or a status in the prompt",
        "A working directory, a git status or a task list changes inside the prefix.",
    ),
    CauseName.BILLING_HEADER: CauseText(
        "A rotating billing line",
        "A client puts a line with a changing hash in front of the system prompt.",
    ),
    CauseName.TOOL_ORDER: CauseText(
        "Tools in another order",
        "The same tools are sent in another order, at the head of the prompt.",
    ),
    CauseName.TOOL_CHANGED: CauseText(
        "Tools change within a conversation",
        "A tool is added, removed or edited after the first turn; all messages come after it.",
    ),
    CauseName.KEY_ORDER: CauseText(
        "JSON keys in another order",
        "Equal JSON is written with its keys in another order, so that its tokens differ.",
    ),
    CauseName.WHITESPACE: CauseText(
        "White space or escapes differ",
        "Equal text is sent with other white space, another Unicode form or other escapes.",
    ),
    CauseName.SETTINGS_CHANGED: CauseText(
        "A setting changes",
        "A setting in the prompt or the cache key changes: tool choice, reasoning effort, …",
    ),
    CauseName.MEDIA_CHANGED: CauseText(
        "Images or files change", "An image or a file is encoded anew, added, removed or moved."
    ),
    CauseName.HISTORY_EDITED: CauseText(
        "History is edited",
        "Earlier messages are dropped, shortened or rewritten; the cache ends at the first edit.",
    ),
    CauseName.COMPACTION: CauseText(
        "A summary replaces the history",
        "A summary replaces the head of the conversation. Legitimate; its frequency matters.",
    ),
    CauseName.REASONING_DROPPED: CauseText(
        "Reasoning is dropped",
        "The reasoning of earlier turns is left out or rendered otherwise in later requests.",
    ),
    CauseName.CONTEXT_MOVED: CauseText(
        "A context block moves",
        "A block of context leaves its old message and reappears in the newest one.",
    ),
    CauseName.CONTEXT_ORDER: CauseText(
        "Fixed text after changing text",
        "Within a message, blocks that other requests have too (documents, instructions) stand "
        "after text that changes, or in another order.",
    ),
    CauseName.SYSTEM_HOISTED: CauseText(
        "A system message is hoisted",
        "A system message from mid-history is moved to the head of the prompt.",
    ),
    CauseName.BREAKPOINT_MISSING: CauseText(
        "No cache breakpoint",
        "The provider writes to its cache only at breakpoints, and the shared part has none.",
        "",
    ),
    CauseName.LOOKBACK_EXCEEDED: CauseText(
        "The last write is out of the look-back",
        "The provider looks back a limited number of blocks; the last write is further away.",
        "",
    ),
    CauseName.BELOW_MINIMUM: CauseText(
        "Shorter than the provider caches",
        "The shared prefix is shorter than the provider's minimum.",
        "",
    ),
    CauseName.TTL_EXPIRED: CauseText(
        "The entry has expired",
        "The gap since the last use is longer than the lifetime of the cache entry.",
        "times",
    ),
    CauseName.PARALLEL_COLD: CauseText(
        "Parallel requests before the first write",
        "Requests with the same prefix start together, before the first has written it.",
        "times",
    ),
    CauseName.MODEL_CHANGED: CauseText(
        "Another model answers",
        "A fallback, a router or an alias chooses another model, which has its own cache.",
        "cached tokens",
    ),
    CauseName.ROUTING: CauseText(
        "Another replica answers",
        "Requests with the same prefix reach different replicas, each with its own cache.",
        "cached tokens",
    ),
    CauseName.CACHE_KEY_SCATTERED: CauseText(
        "Cache keys are scattered",
        "Requests that share a prefix carry different cache keys, which may send them to "
        "different machines.",
        "",
    ),
    CauseName.EVICTED: CauseText(
        "The entry was evicted",
        "The cache was too small to keep the prefix until it was needed again.",
        "cached tokens",
    ),
    CauseName.NAMESPACE_SPLIT: CauseText(
        "The cache is split by tenant",
        "A salt, an adapter or a tenant keeps equal prompts apart.",
        "",
    ),
    CauseName.UNREAD_WRITE: CauseText(
        "A paid write that nobody reads",
        "The write premium is paid for an entry that no later request reads.",
        "",
    ),
    CauseName.NEW_CONTENT: CauseText(
        "New content", "The requests ask for different things. This is no waste."
    ),
    CauseName.OUTSIDE_PROMPT: CauseText(
        "Outside the prompt",
        "The texts are equal and the rule predicts a hit, but the log reports a miss. The reason "
        "is not in the log.",
        "cached tokens",
    ),
}


def absent_causes(findings: Iterable[Finding], quality: Mapping[str, Any]) -> list[CauseName]:
    """Causes that the log has the evidence for and does not show."""
    known = {CauseName.NEW_CONTENT, *(finding.cause for finding in findings)}
    return [
        cause
        for cause, text in CAUSES.items()
        if cause not in known and not _is_missing(text.evidence, quality)
    ]


def missing_checks(quality: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Numbers of causes that the log cannot show, by what it lacks."""
    needs = [text.evidence for name, text in CAUSES.items() if name is not CauseName.NEW_CONTENT]
    return [(name, needs.count(name)) for name in _COUNTS if _is_missing(name, quality)]


def _is_missing(evidence: Evidence, quality: Mapping[str, Any]) -> bool:
    return bool(evidence) and quality.get(_COUNTS[evidence]) == 0
