"""Order of roles: system messages that are not the first, and roles that must alternate.

Some templates drop or refuse a second system message, two messages of one role in a row, or an
answer that comes first. Here such messages become messages that every template writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

JOINED_FIELDS = ("content", "reasoning_content")


def joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join consecutive messages of one role; results of tools stay apart."""
    merged: list[dict[str, Any]] = []
    for role, group in groupby(messages, key=lambda message: message["role"]):
        run = list(group)
        merged += run if role == "tool" or len(run) == 1 else [_one_message(run)]
    return merged


def system_first(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One system message, the first: those at the beginning are joined, later ones become the user's.

    A later one is joined with the messages of the user beside it.
    """
    num_first = _num_system(messages)
    ordered = joined(messages[:num_first])
    for is_user, group in groupby(
        messages[num_first:], key=lambda message: message["role"] in ("system", "user")
    ):
        run = list(group)
        if is_user and any(message["role"] == "system" for message in run):
            run = [_one_message([{**message, "role": "user"} for message in run])]
        ordered += run
    return ordered


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOrder:
    """The order of roles that a chat template demands. The defaults demand nothing.

    Args:
        has_late_system: system messages may stand anywhere; False: there is one, the first.
        has_repeated_roles: messages of one role may follow each other; False: they are joined.
        begins_with_user: after the system prompt.
        fills_after_results: user and assistant alternate, and neither calls nor results count.
        filler: the text of the messages that are put where one is missing.
    """

    has_late_system: bool = True
    has_repeated_roles: bool = True
    begins_with_user: bool = False
    fills_after_results: bool = False
    filler: str = ""

    def apply(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with the texts of these, in this order of roles."""
        if not self.has_late_system:
            messages = system_first(messages)
        if not self.has_repeated_roles:
            messages = joined(messages)
        if self.begins_with_user:
            num_first = _num_system(messages)
            if [message["role"] for message in messages[num_first : num_first + 1]] != ["user"]:
                messages = [*messages[:num_first], self._fill("user"), *messages[num_first:]]
        return self._alternating(messages) if self.fills_after_results else messages

    def _alternating(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        ordered: list[dict[str, Any]] = []
        expected = "user"
        for message in messages:
            role = message["role"]
            if role == "user" or (role == "assistant" and not message.get("tool_calls")):
                if role != expected:
                    ordered.append(self._fill(expected))
                expected = "assistant" if role == "user" else "user"
            ordered.append(message)
        return ordered

    def _fill(self, role: str) -> dict[str, Any]:
        return {"role": role, "content": self.filler}


ANY_ORDER = RoleOrder()


def _num_system(messages: Sequence[dict[str, Any]]) -> int:
    """The system messages before the first message of another role."""
    roles = (message["role"] for message in messages)
    return next((place for place, role in enumerate(roles) if role != "system"), len(messages))


def _one_message(run: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A message with the texts, thoughts and calls of several of one role."""
    message: dict[str, Any] = {"role": run[0]["role"], "content": ""}
    for name in JOINED_FIELDS:
        text = "\n".join(other[name] for other in run if other.get(name))
        if text:
            message[name] = text
    calls = [call for other in run for call in other.get("tool_calls", ())]
    if calls:
        message["tool_calls"] = calls
    return message
