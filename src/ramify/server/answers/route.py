"""`usage.ramify_cache.route`: the replica that computed a request, for the client that sent it."""

from __future__ import annotations

from typing import Any

from ramify.outputs import Placement


def route_json(placement: Placement, num_cached: int) -> dict[str, Any]:
    """The JSON object of a placement.

    Args:
        num_cached: tokens of the prompt that did hit.
    """
    payload: dict[str, Any] = {
        "replica": placement.replica,
        "reason": placement.reason,
        "expected": placement.expected_tokens,
    }
    if placement.other_replica is not None:
        payload["instead_of"] = {
            "replica": placement.other_replica,
            "cached": placement.other_tokens,
            "reason": placement.other_reason,
        }
        if placement.other_queue_s is not None:
            payload["instead_of"]["queue_s"] = round(placement.other_queue_s, 3)
    return payload | {"text": route_text(placement, num_cached)}


def route_text(placement: Placement, num_cached: int) -> str:
    """A placement as a sentence: `hit on replica 3; replica 1 has 4,096 tokens of it but 2.1 s of queue`."""
    text = f"{'hit' if num_cached else 'computed'} on replica {placement.replica}"
    if placement.other_replica is None:
        return text
    reasons = {
        "queue": f"{placement.other_queue_s or 0.0:.1f} s of queue",
        "bound": "more than its share of the work",
        "full": "a full queue",
        "busy": "is busy",
    }
    why = reasons.get(placement.other_reason, placement.other_reason)
    other = f"replica {placement.other_replica} has {placement.other_tokens:,} tokens of it"
    return f"{text}; {other} but {why}"
