"""Causes that usage, replicas, answering models and vendors' own verdicts show."""

from __future__ import annotations

from ramify.analysis.causes.evidence import OWN_ENGINES, Evidence
from ramify.analysis.verdicts import Cause, CauseName, Certainty

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


class Routing:
    """Another replica, deployment or upstream has the entry."""

    def find(self, evidence: Evidence) -> Cause | None:
        """See `OutsideRule`."""
        holder = _other_holder(evidence)
        if holder is None:
            return None
        mine, other = evidence.request.info.replica, evidence.log.requests[holder].info.replica
        if mine is None or other is None or mine == other:
            return None
        certainty = Certainty.LIKELY if evidence.is_billed_miss else Certainty.SUSPECTED
        return Cause(CauseName.ROUTING, certainty, "", had=other, got=mine)


class OtherModelAnswered:
    """The model asked for is the same, the model that answered is another."""

    def find(self, evidence: Evidence) -> Cause | None:
        """See `OutsideRule`."""
        holder = _other_holder(evidence)
        if holder is None:
            return None
        info, other = evidence.request.info, evidence.log.requests[holder].info
        if info.model != other.model or info.response_model is None:
            return None
        if other.response_model in {None, info.response_model}:
            return None
        return Cause(
            CauseName.MODEL_CHANGED,
            Certainty.LIKELY,
            "settings.model",
            had=other.response_model or "",
            got=info.response_model,
        )


def _other_holder(evidence: Evidence) -> int | None:
    """The request whose entry could be read if all shared one cache, and was not."""
    unsplit = evidence.unsplit
    if unsplit.read_from is None or not evidence.is_lost(unsplit.billed.num_read):
        return None
    return unsplit.read_from


class KeyTooBusy:
    """More requests with one key and prefix than one machine takes in a minute."""

    def find(self, evidence: Evidence) -> Cause | None:
        """See `OutsideRule`."""
        rate = evidence.log.key_rates.get(evidence.request.number)
        predicted = evidence.prediction.billed.num_read
        if rate is None or evidence.request.info.cache_key is None:
            return None
        if not evidence.is_lost(predicted, 0):
            return None
        return Cause(
            CauseName.CACHE_KEY_SCATTERED,
            Certainty.LIKELY if evidence.is_billed_miss else Certainty.SUSPECTED,
            "",
            had=f"{rate} requests in a minute with this key and prefix",
            got=f"limit {evidence.rule.max_requests_per_key_min}",
        )


class Evicted:
    """An own engine computed again what it had computed before."""

    def find(self, evidence: Evidence) -> Cause | None:
        """See `OutsideRule`."""
        if evidence.provider not in OWN_ENGINES:
            return None
        missing = _unexplained(evidence)
        if missing is None:
            return None
        return Cause(CauseName.EVICTED, _certainty(evidence), "", *missing)


class UnexplainedMiss:
    """The vendor billed fewer reads than the rule allows, for no reason in the log."""

    def find(self, evidence: Evidence) -> Cause | None:
        """See `OutsideRule`."""
        if evidence.provider in OWN_ENGINES:
            return None
        missing = _unexplained(evidence)
        if missing is None:
            return None
        return Cause(CauseName.OUTSIDE_PROMPT, _certainty(evidence), "", *missing)


class UnexplainedMissInPart:
    """A log with parts of the prompt only: the bill shows a miss where the text goes on.

    What the prompt has beside is not logged, so that the match's bill says what could be read.
    """

    def find(self, evidence: Evidence) -> Cause | None:
        """See `OutsideRule`."""
        info, match = evidence.request.info, evidence.facts.match
        if info.has_full_text or evidence.provider in OWN_ENGINES or not evidence.log.has_reads:
            return None
        goes_on = evidence.facts.divergence is None and not evidence.facts.has_waste
        if match is None or not goes_on or info.conversation is None:
            return None
        before, read = match.info.usage.num_input, info.usage.num_read
        if match.info.conversation != info.conversation or before is None or read is None:
            return None
        if 2 * read > before or before < evidence.rule.min_tokens:
            return None
        had = f"{before} tokens in {evidence.log.name(match.number)}"
        return Cause(
            CauseName.OUTSIDE_PROMPT, Certainty.LIKELY, "", had, f"{read} tokens read by the bill"
        )


def _certainty(evidence: Evidence) -> Certainty:
    """A log in which nothing was ever read is of a server without a cache, or one that does not count."""
    return Certainty.LIKELY if evidence.log.has_reads else Certainty.SUSPECTED


def _unexplained(evidence: Evidence) -> tuple[str, str] | None:
    predicted, usage = evidence.prediction.billed.num_read, evidence.request.info.usage
    if usage.num_read is None or evidence.facts.has_waste or not evidence.is_lost(predicted, 0):
        return None
    if not evidence.request.info.has_full_text:
        return None
    return f"{predicted} tokens by the rule", f"{usage.num_read} tokens read by the bill"


class VendorSaysOtherwise:
    """The vendor names a difference that the log's text does not show."""

    def find(self, evidence: Evidence) -> Cause | None:
        """See `OutsideRule`."""
        verdict = evidence.request.info.verdict
        if verdict is None or verdict.reason in NO_VERDICTS:
            return None
        places = REASON_PLACES.get(verdict.reason)
        divergence = evidence.facts.divergence
        if divergence is not None and (places is None or is_at(divergence, places)):
            return None
        return Cause(CauseName.OUTSIDE_PROMPT, Certainty.LIKELY, "", got=verdict.reason)


def is_at(path: str, places: tuple[str, ...]) -> bool:
    """Whether a segment lies in one of these parts of a prompt."""
    return any(
        path == place or path.startswith((f"{place}[", f"{place}.")) for place in places if place
    )
