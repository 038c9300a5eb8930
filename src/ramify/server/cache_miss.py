"""Why tokens of a prompt had to be computed, in the caller's words and about the caller's data only."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ramify.cache.explain import Explanation
from ramify.server.prompt_renderer import RenderedPrompt

SHOWN_TOKENS = 24  # of each side, at the place where they part
REASONS = {
    "hit": "hit",
    "page_tail": "page_tail",
    "pending": "in_flight",
    "evicted": "evicted",
    "diverged": "diverged",
    "namespace": "other_namespace",
    "never_seen": "cold",
}


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """The first token that was not found, and why."""

    reason: str  # cold, diverged, evicted, other_namespace, page_tail, in_flight, disabled
    at_token: int
    segment: str | None = None
    had: str | None = None  # what the cached prompt goes on with
    got: str | None = None  # what this one goes on with
    evicted_ago_s: float | None = None
    evicted_by: str | None = None

    def as_json(self) -> dict[str, object]:
        """Fields that have something to say."""
        fields = (
            "reason",
            "at_token",
            "segment",
            "had",
            "got",
            "evicted_ago_s",
            "evicted_by",
        )
        found = {name: getattr(self, name) for name in fields}
        return {name: value for name, value in found.items() if value is not None}


def explain_miss(
    explanation: Explanation,
    prompt: RenderedPrompt,
    decode: Callable[[Sequence[int]], str],
) -> CacheMiss | None:
    """What stopped a lookup; None if all that can be found was.

    Args:
        explanation: of the prompt's key, with nothing in it of other tenants.
        decode: token ids to text.
    """
    reason = REASONS[explanation.reason]
    if reason == "hit":
        return None
    at = (
        explanation.diverged_at
        if reason == "diverged" and explanation.diverged_at is not None
        else None
    )
    at = explanation.hit_tokens if at is None else at
    had = None
    if reason == "diverged" and explanation.sibling:
        sibling = array("i")
        sibling.frombytes(explanation.sibling)
        begin = at - explanation.hit_tokens
        had = decode(sibling[begin : begin + SHOWN_TOKENS])
    shown = reason in ("diverged", "evicted", "other_namespace")
    return CacheMiss(
        reason,
        at,
        prompt.path_at(at),
        had,
        decode(prompt.ids[at : at + SHOWN_TOKENS]) if shown else None,
        explanation.evicted_ago_s if reason == "evicted" else None,
        explanation.evicted_by if reason == "evicted" else None,
    )
