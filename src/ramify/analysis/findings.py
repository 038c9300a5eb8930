"""Findings: the same cause at the same place, over all requests, and what to do about it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ramify.analysis.savings.fixing import Fix, generalise
from ramify.analysis.verdicts import (
    Cause,
    CauseName,
    Certainty,
    Example,
    Finding,
    Partner,
    Saving,
    ValueKind,
    Verdict,
)
from ramify.prompt_rules import RULES

_PLAIN = re.compile(
    r"(?=.*\d)[\w :./+-]{1,40}"
)  # no mark that a terminal, a page or Markdown reads

# What a value of each kind is, and what else would do.
_MOVED = {
    ValueKind.CLOCK: ("the date or time", ", or round it to the day"),
    ValueKind.ID: ("the id", ", or leave it out"),
    ValueKind.STATE: ("the path or status", ""),
    ValueKind.UNKNOWN: ("the value that is another in every request", ", or leave it out"),
}


def move_value(kind: ValueKind, example: str = "") -> str:
    """What to do about a value that changes, with one that the log has if it is short and plain."""
    what, otherwise = _MOVED[kind]
    bare = example.strip(" .,;:")
    quoted = f' ("{bare}")' if _PLAIN.fullmatch(bare) else ""
    return (
        f"Move {what}{quoted} to the end of the newest user message and leave it there{otherwise}."
    )


def rule_advice(rule: str) -> str:
    """The sentence that names a rule of the server, which mends the prompt without a change of the client."""
    target = RULES[rule].target.value
    return f"`ramify serve --prompt-rules {rule}` moves the text to {target}."


CHANGES: dict[CauseName, str] = {
    CauseName.CLOCK: move_value(ValueKind.CLOCK),
    CauseName.RANDOM_ID: move_value(ValueKind.ID),
    CauseName.PATH_OR_STATE: move_value(ValueKind.STATE),
    CauseName.BILLING_HEADER: "Switch the client's billing header off, or strip the line in the gateway (`ramify serve --prompt-rules billing-header`).",
    CauseName.TOOL_ORDER: "Sort the tools by name before sending.",
    CauseName.TOOL_CHANGED: "Keep the tools of a conversation; add late tools at the end, or defer them.",
    CauseName.KEY_ORDER: "Serialise JSON with sorted keys.",
    CauseName.WHITESPACE: "Send the text byte for byte as before: same white space, Unicode form, escapes.",
    CauseName.SETTINGS_CHANGED: "Keep the setting for the whole conversation.",
    CauseName.MEDIA_CHANGED: "Send images and files byte for byte as before, and keep old ones in place.",
    CauseName.HISTORY_EDITED: "Append to the history; cut it rarely and far, not a little at every turn.",
    CauseName.REASONING_DROPPED: "Send the reasoning of earlier turns back as received.",
    CauseName.CONTEXT_MOVED: "Leave the block where it was sent first; append what is new.",
    CauseName.CONTEXT_ORDER: "Put what all requests have first, then documents in a fixed order (by name or id), and the question last.",
    CauseName.SYSTEM_HOISTED: "Leave later system messages at their place in the history.",
    CauseName.COMPACTION: "Nothing to mend: each compaction rewrites the prompt once; compact rarely.",
    CauseName.BREAKPOINT_MISSING: "Place a cache breakpoint at the end of the part that stays.",
    CauseName.LOOKBACK_EXCEEDED: "Place a second breakpoint so that no write is out of the look-back.",
    CauseName.BELOW_MINIMUM: "Nothing to mend: the shared prefix is shorter than the provider caches.",
    CauseName.TTL_EXPIRED: "Ask for a longer lifetime, or keep the entry warm.",
    CauseName.PARALLEL_COLD: "Send one request first, and the others when it has begun to answer.",
    CauseName.MODEL_CHANGED: "Keep a conversation on one model.",
    CauseName.ROUTING: "Route requests with the same prefix to the same replica.",
    CauseName.CACHE_KEY_SCATTERED: "Use one cache key for all requests that share a prefix.",
    CauseName.EVICTED: "Give the cache more capacity, or send related requests closer together.",
    CauseName.NAMESPACE_SPLIT: "Use one salt, adapter or tenant for prompts that may be shared.",
    CauseName.UNREAD_WRITE: "Leave out the breakpoint: nobody reads this entry.",
    CauseName.OUTSIDE_PROMPT: "Nothing to mend in the prompt.",
}
MAX_HIDDEN, MAX_PARTNERS = 4, 3  # causes that save nothing alone, and partners tried of each
MAX_SECONDS = 6.0
_ORDER = list(Certainty)


@dataclass(slots=True)
class _Group:
    requests: set[int] = field(default_factory=set)
    tokens_lost: int = 0
    example: Example | None = None
    certainty: Certainty = Certainty.SUSPECTED
    kind: ValueKind | None = None
    rule: str = ""


@dataclass(frozen=True, slots=True)
class FoundCause:
    """A finding without its saving."""

    fix: Fix
    certainty: Certainty
    requests: frozenset[int]  # numbers of verdicts
    tokens_lost: int
    example: Example
    kind: ValueKind | None = None  # of the value in the example
    rule: str = ""  # of `--prompt-rules` that takes it out of the prompt

    def finding(self, saving: Saving, partner: Partner | None = None) -> Finding:
        """With the savings that replays have shown."""
        return Finding(
            cause=self.fix.cause,
            certainty=self.certainty,
            segment=self.fix.segment,
            num_requests=len(self.requests),
            tokens_lost=self.tokens_lost,
            example=self.example,
            change=self._change,
            saving=saving,
            partner=partner,
            kind=self.kind,
            rule=self.rule,
        )

    @property
    def _change(self) -> str:
        if self.kind is None:
            return CHANGES[self.fix.cause]
        change = move_value(self.kind, self.example.got)
        return (
            f"{change} Or let the server do it: {rule_advice(self.rule)}" if self.rule else change
        )


def group_causes(verdicts: Iterable[Verdict]) -> list[FoundCause]:
    """Causes by name and place, those that lose most first.

    A request's loss counts for its first cause: the others stand behind it.
    """
    groups: dict[Fix, _Group] = {}
    for number, verdict in enumerate(verdicts):
        waste = [cause for cause in verdict.causes if cause.cause is not CauseName.NEW_CONTENT]
        for at, cause in enumerate(waste):
            fix = Fix(cause.cause, generalise(cause.segment))
            _add(groups.setdefault(fix, _Group()), number, verdict, cause, is_first=at == 0)
    found_causes = [
        FoundCause(
            fix,
            group.certainty,
            frozenset(group.requests),
            group.tokens_lost,
            group.example,
            group.kind,
            group.rule,
        )
        for fix, group in groups.items()
        if group.example is not None
    ]
    return sorted(found_causes, key=lambda item: (-item.tokens_lost, -len(item.requests)))


def find_partners(
    found_causes: Sequence[FoundCause],
    savings: Sequence[Saving],
    measure: Callable[[Sequence[Fix]], Saving],
    *,
    max_seconds: float = MAX_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> dict[Fix, Partner]:
    """For causes that save nothing alone, the one of the same requests with which they save most.

    Args:
        found_causes: those with a saving.
        savings: of each alone, in the same order.
        measure: replays a set of fixes.
    """
    partners: dict[Fix, Partner] = {}
    alone = dict(zip((item.fix for item in found_causes), savings, strict=False))
    hidden = [item for item in found_causes if item.fix in alone and alone[item.fix].tokens <= 0]
    end = clock() + max_seconds
    pairs = [
        (item.fix, other.fix)
        for item in hidden[:MAX_HIDDEN]
        for other in _neighbours(item, [cause for cause in found_causes if cause.fix in alone])
    ]
    best: dict[Fix, int] = {}
    for fix, other_fix in pairs:
        if clock() > end:
            break
        together = measure([fix, other_fix])
        gain = together.tokens - max(0, alone[other_fix].tokens)
        if gain > best.get(fix, 0):
            best[fix] = gain
            partners[fix] = Partner(other_fix.cause, other_fix.segment, together)
    return partners


def _neighbours(item: FoundCause, candidates: Iterable[FoundCause]) -> list[FoundCause]:
    """The causes that most requests of `item` have too, at most MAX_PARTNERS."""
    others = [other for other in candidates if other is not item and other.requests & item.requests]
    others.sort(key=lambda other: -len(other.requests & item.requests))
    return others[:MAX_PARTNERS]


def _add(group: _Group, number: int, verdict: Verdict, cause: Cause, *, is_first: bool) -> None:
    group.requests.add(number)
    if is_first and cause.cause is not CauseName.COMPACTION:
        group.tokens_lost += verdict.tokens.lost
    if _ORDER.index(cause.certainty) < _ORDER.index(group.certainty) or group.example is None:
        group.certainty = cause.certainty
        group.example = Example(verdict.line, cause.had, cause.got, verdict.file)
        group.kind, group.rule = cause.kind, cause.rule


def order_by_saving(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Greatest saving first."""
    return tuple(sorted(findings, key=lambda item: (-item.saving.tokens, -item.tokens_lost)))
