"""A miss of pages that a tier had: in an answer's usage, and over the link of a cluster."""

from array import array

import msgspec

from ramify.outputs import Explanation, PrefixReport, TierMiss
from ramify.server.history.cache_miss import explain_miss
from ramify.server.prompts.renderer import RenderedPrompt

EXPLANATION = Explanation(40, 16, "never_seen", tier_miss=TierMiss("disk", "corrupt", 16, 32))


def test_an_answer_names_the_tier_and_why_it_was_not_read() -> None:
    """Beside the reason in the pool, which stays as it is."""
    miss = explain_miss(EXPLANATION, RenderedPrompt(array("i", range(40))), lambda _: "", 16)

    assert miss is not None
    assert miss.as_json() == {
        "reason": "cold",
        "at_token": 16,
        "segment": "prompt",
        "tier": "disk",
        "tier_reason": "corrupt",
    }


def test_the_report_of_a_replica_arrives_whole() -> None:
    """The miss is part of what the link carries."""
    report = PrefixReport(EXPLANATION)

    sent = msgspec.msgpack.encode(report)

    assert msgspec.msgpack.decode(sent, type=PrefixReport) == report
