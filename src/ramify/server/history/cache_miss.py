"""Why a prompt missed the cache, for the client that sent it: it names no other tenant's data."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ramify.outputs import Explanation
from ramify.server.prompts.next_turns import common_prefix
from ramify.server.prompts.renderer import RenderedPrompt

SHOWN_TOKENS = 24  # of each prompt, from where they diverge
SEAM_TOKENS = 4  # behind a system prompt, where its end may change how the text is split
REASONS = {  # of `Explanation` -> in responses
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
    """The first prompt token that missed the cache, and why."""

    # cold, new_turn, diverged, evicted, other_namespace, page_tail, shorter_than_a_page, in_flight,
    # disabled
    reason: str
    at_token: int
    segment: str | None = None
    had: str | None = None  # the cached prompt's text from `at_token` on
    got: str | None = None  # this prompt's text from `at_token` on
    evicted_ago_s: float | None = None
    evicted_by: str | None = None
    tier: str | None = None  # had the next page
    # Why it was not loaded: slower, late, corrupt, io_error, absent, evicted; unanswered: nobody knows in time.
    tier_reason: str | None = None
    warning: str | None = None  # what makes the miss dearer than it had to be

    def as_json(self) -> dict[str, object]:
        """The fields that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _continues(prompt: RenderedPrompt, num_hit: int, page_size: int) -> bool:
    """Whether a hit has all of a conversation that came before its last answer, up to a page."""
    num_earlier = prompt.num_earlier_tokens
    return num_hit > 0 and 0 < num_earlier < num_hit + page_size


def explain_miss(
    explanation: Explanation,
    prompt: RenderedPrompt,
    decode: Callable[[Sequence[int]], str],
    page_size: int,
) -> CacheMiss | None:
    """The token at which the cache lookup of a prompt ended; None if it hit all it could.

    Args:
        explanation: of the prompt's key, restricted to the caller's own data.
    """
    reason = REASONS[explanation.reason]
    if reason == "hit":
        return None
    at_token = explanation.read_tokens
    if reason == "page_tail" and explanation.hit_tokens == 0:
        reason = "shorter_than_a_page"
    elif reason == "cold" and _continues(prompt, explanation.hit_tokens, page_size):
        reason = "new_turn"
    if reason == "diverged" and explanation.diverged_at is not None:
        at_token = explanation.diverged_at
    had = warning = None
    if reason == "diverged" and explanation.sibling:
        sibling = array("i")
        sibling.frombytes(explanation.sibling)
        begin = at_token - explanation.hit_tokens
        had = decode(sibling[begin : begin + SHOWN_TOKENS])
        warning = _tools_warning(prompt, at_token, sibling[begin:])
    is_shown = reason in ("diverged", "evicted", "other_namespace")
    tier_miss = explanation.tier_miss
    return CacheMiss(
        reason,
        at_token,
        prompt.path_at(at_token),
        had,
        decode(prompt.ids[at_token : at_token + SHOWN_TOKENS]) if is_shown else None,
        explanation.evicted_ago_s if reason == "evicted" else None,
        explanation.evicted_by if reason == "evicted" else None,
        None if tier_miss is None else tier_miss.tier,
        None if tier_miss is None else tier_miss.reason,
        warning,
    )


def _tools_warning(prompt: RenderedPrompt, at_token: int, cached: array[int]) -> str | None:
    """Warning about tools that are computed again because the system prompt changed.

    Args:
        cached: tokens of the cached prompt from `at_token` on.
    """
    tools = prompt.tools_behind_system
    if tools is None or at_token >= tools.system_end:
        return None
    begin = tools.system_end + SEAM_TOKENS
    ids = array("i", prompt.ids[begin : tools.tools_end])
    # Bytes can match between two tokens too.
    position, remainder = divmod(cached.tobytes().find(ids[:SHOWN_TOKENS].tobytes()), ids.itemsize)
    num_common = 0 if remainder else common_prefix(cached[position:], ids)
    if not num_common:
        return None
    # Only whole pages are cached: what is missing at the end counts as equal.
    if position + num_common == len(cached):
        num_common = len(ids)
    option = ", or start the server with --tools-first" if tools.can_be_first else ""
    return (
        f"tools stand after the system prompt in this template: {SEAM_TOKENS + num_common} "
        f"tokens of them are computed again; move what changes to a later message{option}"
    )
