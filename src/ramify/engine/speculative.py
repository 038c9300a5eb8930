"""Guesses for a request's next tokens, which one step verifies all at once."""

from __future__ import annotations

from typing import Protocol

from ramify.engine.request import Request


class Drafter(Protocol):
    """Where drafts come from. A wrong one costs time, never a token."""

    def propose(self, request: Request, limit: int) -> tuple[int, ...]:
        """At most `limit` guesses for the tokens after those that are known; often none.

        Called before each step for each running request that is about to compute one token.
        """
        ...
