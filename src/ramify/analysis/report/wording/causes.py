"""Causes of lost hits in words: a title, what happens, and the check that passed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ramify.analysis.verdicts import CauseName, Finding


@dataclass(frozen=True, slots=True)
class CauseText:
    """What a reader needs to know about a cause."""

    cause: CauseName
    title: str
    what: str  # happens, and why the cache cannot read past it
    check: str  # a sentence that is true where the cause does not occur


_TEXTS = (
    CauseText(
        CauseName.CLOCK,
        "A clock in the prompt",
        "A date or time is rendered before the end of the prompt. Everything behind it differs from "
        "request to request.",
        "No clock before the newest message",
    ),
    CauseText(
        CauseName.RANDOM_ID,
        "A random id in the prompt",
        "An id is drawn anew for each request or session. Everything behind it differs.",
        "No random id before the newest message",
    ),
    CauseText(
        CauseName.PATH_OR_STATE,
        "A path or a status in the prompt",
        "A working directory, a git status or a task list changes inside the prefix.",
        "No changing path or status in the prefix",
    ),
    CauseText(
        CauseName.BILLING_HEADER,
        "A rotating billing line",
        "A client puts a line with a changing hash in front of the system prompt.",
        "No rotating billing line",
    ),
    CauseText(
        CauseName.TOOL_ORDER,
        "Tools in another order",
        "The same tools are sent in another order. They stand at the head of the prompt, so that "
        "nothing behind them can be read.",
        "Tools keep their order",
    ),
    CauseText(
        CauseName.TOOL_CHANGED,
        "Tools change within a conversation",
        "A tool is added, removed or edited after the first turn. The whole conversation stands "
        "behind the tools.",
        "Tools stay the same within a conversation",
    ),
    CauseText(
        CauseName.KEY_ORDER,
        "JSON keys in another order",
        "Equal JSON is written with its keys in another order, so that its tokens differ.",
        "JSON keys keep their order",
    ),
    CauseText(
        CauseName.WHITESPACE,
        "White space or escapes differ",
        "Equal text is sent with other white space, another Unicode form or other escapes.",
        "Equal text is sent byte for byte",
    ),
    CauseText(
        CauseName.SETTINGS_CHANGED,
        "A setting changes",
        "A setting that is part of the prompt or of the cache key changes, such as the tool choice "
        "or the reasoning effort.",
        "Settings stay the same within a conversation",
    ),
    CauseText(
        CauseName.MEDIA_CHANGED,
        "Images or files change",
        "An image or a file is encoded anew, added, removed or moved.",
        "Images and files stay the same",
    ),
    CauseText(
        CauseName.HISTORY_EDITED,
        "History is edited",
        "Earlier messages are dropped, shortened or rewritten. The cache ends at the first edit.",
        "History only grows",
    ),
    CauseText(
        CauseName.COMPACTION,
        "A summary replaces the history",
        "The head of the conversation is replaced by a summary. This is legitimate; its frequency "
        "matters.",
        "No compaction",
    ),
    CauseText(
        CauseName.REASONING_DROPPED,
        "Reasoning is dropped",
        "The reasoning of earlier turns is left out or rendered otherwise in later requests.",
        "Reasoning is sent back as received",
    ),
    CauseText(
        CauseName.CONTEXT_MOVED,
        "A context block moves",
        "A block of context leaves its old message and reappears in the newest one.",
        "Context blocks stay in place",
    ),
    CauseText(
        CauseName.CONTEXT_ORDER,
        "Fixed text behind changing text",
        "Within a message, blocks that other requests have too (documents, instructions) stand behind "
        "text that changes, or in another order.",
        "Messages begin with what they share",
    ),
    CauseText(
        CauseName.SYSTEM_HOISTED,
        "A system message is hoisted",
        "A system message from mid-history is moved to the head of the prompt.",
        "System messages stay in place",
    ),
    CauseText(
        CauseName.BREAKPOINT_MISSING,
        "No cache breakpoint",
        "The provider writes to its cache only at breakpoints, and the shared part has none.",
        "Breakpoints cover what is shared",
    ),
    CauseText(
        CauseName.LOOKBACK_EXCEEDED,
        "The last write is out of the look-back",
        "The provider looks back a limited number of blocks from a breakpoint. The last write is "
        "further away.",
        "Writes are within the look-back",
    ),
    CauseText(
        CauseName.BELOW_MINIMUM,
        "Shorter than the provider caches",
        "The shared prefix is shorter than the provider's minimum.",
        "Shared prefixes are longer than the minimum",
    ),
    CauseText(
        CauseName.TTL_EXPIRED,
        "The entry has expired",
        "The gap since the last use is longer than the lifetime of the cache entry.",
        "Gaps are shorter than the lifetime",
    ),
    CauseText(
        CauseName.PARALLEL_COLD,
        "Parallel requests before the first write",
        "Requests with the same prefix start together, before the first has written it.",
        "Parallel requests find a warm cache",
    ),
    CauseText(
        CauseName.MODEL_CHANGED,
        "Another model answers",
        "A fallback, a router or an alias sends the conversation to another model, which has "
        "its own cache.",
        "Each conversation keeps its model",
    ),
    CauseText(
        CauseName.ROUTING,
        "Another replica answers",
        "Requests with the same prefix reach different replicas, each with its own cache.",
        "Requests with the same prefix reach the same replica",
    ),
    CauseText(
        CauseName.CACHE_KEY_SCATTERED,
        "Cache keys are scattered",
        "Requests that share a prefix carry different cache keys, which may send them to different "
        "machines.",
        "Cache keys follow the shared prefixes",
    ),
    CauseText(
        CauseName.EVICTED,
        "The entry was evicted",
        "The cache was too small to keep the prefix until it was needed again.",
        "Nothing is evicted before its reuse",
    ),
    CauseText(
        CauseName.NAMESPACE_SPLIT,
        "The cache is split by tenant",
        "A salt, an adapter or a tenant keeps equal prompts apart.",
        "Equal prompts share a namespace",
    ),
    CauseText(
        CauseName.UNREAD_WRITE,
        "A paid write that nobody reads",
        "The write premium is paid for an entry that no later request reads.",
        "Writes are read",
    ),
    CauseText(
        CauseName.NEW_CONTENT,
        "New content",
        "The requests ask for different things. This is no waste.",
        "",
    ),
    CauseText(
        CauseName.OUTSIDE_PROMPT,
        "Outside the prompt",
        "The texts are equal and the rule predicts a hit, but the log reports a miss. The reason "
        "is not in the log.",
        "No miss without an explanation",
    ),
)
_BY_TIMES = frozenset({CauseName.TTL_EXPIRED, CauseName.PARALLEL_COLD})
_BY_USAGE = frozenset(
    {
        CauseName.EVICTED,
        CauseName.MODEL_CHANGED,
        CauseName.OUTSIDE_PROMPT,
        CauseName.ROUTING,
    }
)
_BY_PREFIX = frozenset(
    {
        CauseName.BELOW_MINIMUM,
        CauseName.BREAKPOINT_MISSING,
        CauseName.CACHE_KEY_SCATTERED,
        CauseName.LOOKBACK_EXCEEDED,
        CauseName.NAMESPACE_SPLIT,
        CauseName.UNREAD_WRITE,
    }
)
CAUSES: dict[CauseName, CauseText] = {text.cause: text for text in _TEXTS}


def passed_checks(
    findings: Iterable[Finding], quality: Mapping[str, Any] | None = None
) -> tuple[CauseText, ...]:
    """Causes that the log could have shown and does not, in the order of `CauseName`.

    With the quality of the log, causes for which it has no evidence are left out.
    """
    seen = {finding.cause for finding in findings}
    return tuple(
        text
        for text in _TEXTS
        if text.check and text.cause not in seen and not missing_evidence(text.cause, quality or {})
    )


def missing_evidence(cause: CauseName, quality: Mapping[str, Any]) -> str:
    """What a cause would show in and the log has none of; empty if it is there."""
    if cause in _BY_PREFIX:
        return ""
    if cause in _BY_TIMES:
        return "times" if quality.get("num_with_times") == 0 else ""
    if cause in _BY_USAGE:
        return "cached tokens" if quality.get("num_with_reads") == 0 else ""
    return "texts" if quality.get("num_with_text") == 0 else ""


def missing_checks(quality: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Numbers of causes that could not be checked, by what the log lacks."""
    lacks = [missing_evidence(text.cause, quality) for text in _TEXTS if text.check]
    return tuple(
        (name, lacks.count(name)) for name in ("texts", "times", "cached tokens") if name in lacks
    )
