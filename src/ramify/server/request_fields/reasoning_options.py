"""Reasoning effort and budget as each API spells them, and the chat template variables for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

NO_EFFORT = "none"  # the effort that turns reasoning off


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """Options of a request's reasoning; None: the chat template decides."""

    is_enabled: bool | None = None
    effort: str | None = None  # "none", "low", "high", …, as the client says it
    budget: int | None = None  # tokens; for templates that write it into the prompt

    def template_variables(self, names: frozenset[str]) -> dict[str, Any]:
        """The chat template variables of these options.

        Args:
            names: of the variables that the template mentions; it gets no other.
        """
        is_off = self.is_enabled is False
        variables = {
            "enable_thinking": self.is_enabled,
            "thinking": self.is_enabled,
            # Cohere's switch. In templates with another, it is a text that they compute.
            "reasoning": None if names & {"enable_thinking", "thinking"} else self.is_enabled,
            "reasoning_effort": self.effort,
            # Seed-OSS has no other switch.
            "thinking_budget": 0 if is_off and self.budget is None else self.budget,
        }
        return {
            name: value for name, value in variables.items() if value is not None and name in names
        }


def implied_switch(effort: str | None, budget: int | None) -> bool | None:
    """Whether an effort or a budget alone turns reasoning on; None if neither is given."""
    if budget is not None:
        return budget > 0
    return None if effort is None else effort != NO_EFFORT


def first_set(*values: T | None) -> T | None:
    """The first value that is not None; None if all are."""
    return next((value for value in values if value is not None), None)


# `thinking.type` of Anthropic and of those who took over its form.
THINKING_TYPES: Mapping[str, bool] = {
    "enabled": True,
    "adaptive": True,
    "auto": True,
    "disabled": False,
}


def unknown_thinking(kind: str) -> str:
    """The warning for a `thinking.type` that is in no table."""
    return f"thinking.type {kind!r} is ignored; the types are {', '.join(THINKING_TYPES)}"
