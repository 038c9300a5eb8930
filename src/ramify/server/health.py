"""Liveness and readiness: whether the server takes requests, and why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ramify.engine.serving.engine_thread import EngineState, Health
from ramify.server.errors import ApiError

RETRY_S = 5  # another server takes over within this time


class Readiness:
    """State behind `/livez` and `/readyz`.

    Args:
        engine: returns the engine's health; `AsyncLLM.health`.
    """

    def __init__(self, engine: Callable[[], Health]) -> None:
        self._engine = engine
        self.is_ready = self.is_draining = False

    def liveness_failure(self) -> str | None:
        """The reason to restart this process; None while it is alive."""
        if self.has_lost_engine:
            return "engine stopped"
        if self._engine().stuck_s is not None:
            return "engine stuck"
        return None

    @property
    def has_lost_engine(self) -> bool:
        """Whether the engine has ended by itself."""
        health = self._engine()
        is_away = health.state is EngineState.UNREACHABLE  # to start anew would not help
        return not health.is_alive and not self.is_draining and not is_away

    def unready_reason(self) -> str | None:
        """The reason to send requests to another server; None while they are served."""
        if self.is_draining:
            return "draining"
        if not self.is_ready:
            return "starting"
        if self._engine().state is EngineState.UNREACHABLE:
            return "no replica"
        return self.liveness_failure()

    def reject_if_draining(self) -> None:
        """Raise ApiError 503 while the server shuts down."""
        if self.is_draining:
            raise ApiError(
                503,
                "this server is shutting down; send the request to another one, or later",
                code="draining",
                retry_after_s=RETRY_S,
            )

    def as_json(self) -> dict[str, Any]:
        """The engine's state, as both endpoints report it."""
        health = self._engine()
        age = health.step_age_s
        return {
            "engine": str(health.state),
            "busy": health.is_busy,
            "step_age_s": None if age is None else round(age, 3),
        }
