"""Causes that usage, replicas, answering models and vendors' own verdicts show."""

from __future__ import annotations

from ramify.analysis.compare.evidence import MIN_LOSS, OWN_ENGINES, Evidence, outside_cause
from ramify.analysis.records import LoggedRequest
from ramify.analysis.verdicts import Cause, CauseName

NO_VERDICTS = frozenset(
    {"cache_hit", "hit", "none", "null", "pending", "previous_message_not_found", "unavailable"}
)
# Where in a prompt the difference is that a vendor's reason speaks of; a prefix of segment paths.
REASON_PLACES = {
    "model_changed": ("settings.model",),
    "tools_changed": ("tools",),
    "system_changed": ("system",),
    "messages_changed": ("messages",),
    "input_changed": ("messages", "system", "prompt"),
    "context_compacted": ("messages",),
    "text_format_changed": ("settings.text", "settings.response_format"),
    "reasoning_effort_changed": ("settings.reasoning", "settings.reasoning_effort"),
    "verbosity_changed": ("settings.verbosity", "settings.text"),
    "service_tier_changed": ("settings.service_tier",),
    "prompt_cache_key_changed": ("",),
}


# Reasons of our own server's records that name a cause; the others say that the prompt is new.
_OWN_REASONS = {
    "evicted": CauseName.EVICTED,
    "in_flight": CauseName.PARALLEL_COLD,
    "other_namespace": CauseName.NAMESPACE_SPLIT,
}


def own_server_says(evidence: Evidence) -> Cause | None:
    """The reason for the miss that the record of our own server gives."""
    verdict = evidence.request.info.verdict
    cause = None if verdict is None else _OWN_REASONS.get(verdict.reason)
    if verdict is None or cause is None or (verdict.num_missed or 0) < MIN_LOSS:
        return None
    got = f"{verdict.num_missed} tokens missed: {verdict.reason}"
    return outside_cause(cause, segment=verdict.segment, got=got)


def routing(evidence: Evidence) -> Cause | None:
    """Another replica, deployment or upstream has the entry."""
    holder = _other_holder(evidence)
    if holder is None:
        return None
    mine, other = evidence.request.info.replica, holder.replica
    if mine is None or other is None or mine == other:
        return None
    return outside_cause(CauseName.ROUTING, had=other, got=mine, is_likely=evidence.is_billed_miss)


def other_model_answered(evidence: Evidence) -> Cause | None:
    """The model asked for is the same, the model that answered is another."""
    holder, info = _other_holder(evidence), evidence.request.info
    if holder is None or info.model != holder.model or info.response_model is None:
        return None
    if holder.response_model in {None, info.response_model}:
        return None
    return outside_cause(
        CauseName.MODEL_CHANGED,
        segment="settings.model",
        had=holder.response_model or "",
        got=info.response_model,
    )


def _other_holder(evidence: Evidence) -> LoggedRequest | None:
    """The request whose entry could be read if all shared one cache, and was not."""
    unsplit = evidence.unsplit
    if unsplit.read_from is None or not evidence.is_lost(unsplit.billed.num_read):
        return None
    return evidence.log.requests[unsplit.read_from].info


def key_too_busy(evidence: Evidence) -> Cause | None:
    """More requests with one key and prefix than one machine takes in a minute."""
    rate = evidence.log.key_rates.get(evidence.request.number)
    if rate is None or evidence.request.info.cache_key is None:
        return None
    if not evidence.is_lost(evidence.prediction.billed.num_read, 0):
        return None
    return outside_cause(
        CauseName.CACHE_KEY_SCATTERED,
        had=f"{rate} requests in a minute with this key and prefix",
        got=f"limit {evidence.rule.max_requests_per_key_min}",
        is_likely=evidence.is_billed_miss,
    )


def unexplained_miss(evidence: Evidence) -> Cause | None:
    """Fewer reads are billed than the rule allows, for no reason in the log.

    An own engine has computed again what it had computed before: it evicted the entry.
    """
    predicted, num_read = evidence.prediction.billed.num_read, evidence.request.info.usage.num_read
    if num_read is None or not evidence.has_clean_text or not evidence.is_lost(predicted, 0):
        return None
    return outside_cause(
        CauseName.EVICTED if evidence.provider in OWN_ENGINES else CauseName.OUTSIDE_PROMPT,
        had=f"{predicted} tokens by the rule",
        got=f"{num_read} tokens read by the bill",
        # Where nothing was ever read, the server has no cache, or does not count its reads.
        is_likely=evidence.log.has_reads,
    )


def unexplained_miss_in_part(evidence: Evidence) -> Cause | None:
    """A log with parts of the prompt only: the bill shows a miss where the text goes on.

    What the prompt has beside is not logged, so that the match's bill says what could be read.
    """
    info, facts, bills = evidence.request.info, evidence.facts, evidence.miss_by_bills
    if info.has_full_text or evidence.provider in OWN_ENGINES or not evidence.log.has_reads:
        return None
    goes_on = facts.divergence is None and not facts.has_waste
    if facts.match is None or bills is None or not goes_on or info.conversation is None:
        return None
    if facts.match.info.conversation != info.conversation:
        return None
    before, num_read = bills
    return outside_cause(
        CauseName.OUTSIDE_PROMPT,
        had=f"{before} tokens in {evidence.log.name(facts.match.number)}",
        got=f"{num_read} tokens read by the bill",
    )


def vendor_says_otherwise(evidence: Evidence) -> Cause | None:
    """The vendor names a difference that the log's text does not show."""
    verdict, divergence = evidence.request.info.verdict, evidence.facts.divergence
    if verdict is None or verdict.reason in NO_VERDICTS:
        return None
    places = REASON_PLACES.get(verdict.reason)
    if divergence is not None and (places is None or _is_at(divergence, places)):
        return None
    return outside_cause(CauseName.OUTSIDE_PROMPT, got=verdict.reason)


def _is_at(path: str, places: tuple[str, ...]) -> bool:
    """Whether a segment lies in one of these parts of a prompt."""
    return any(
        path == place or path.startswith((f"{place}[", f"{place}.")) for place in places if place
    )
