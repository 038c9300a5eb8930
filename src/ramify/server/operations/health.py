"""Whether a server takes requests, and if not, why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ramify.engine.serving.engine_thread import Health
from ramify.server.errors import ApiError

RETRY_S = 5  # to a client of a server that is about to end: another one takes over


class Readiness:
    """The words of `/livez` and `/readyz`.

    Args:
        engine: see `AsyncLLM.health`.
    """

    def __init__(self, engine: Callable[[], Health]) -> None:
        self._engine = engine
        self.is_ready = self.is_draining = False

    def liveness_failure(self) -> str | None:
        """Why only another process can help, if so."""
        health = self._engine()
        if not health.is_alive and not self.is_draining:
            return "engine stopped"
        if health.stuck_s is not None:
            return "engine stuck"
        return None

    def unready_reason(self) -> str | None:
        """Why requests had better go elsewhere, if so."""
        if self.is_draining:
            return "draining"
        if not self.is_ready:
            return "starting"
        return self.liveness_failure()

    def reject_if_draining(self) -> None:
        """Raise ApiError 503 when no request is to begin any more."""
        if self.is_draining:
            raise ApiError(
                503,
                "this server is shutting down; send the request to another one, or later",
                code="draining",
                retry_after_s=RETRY_S,
            )

    def as_json(self) -> dict[str, Any]:
        """What the engine is doing."""
        health = self._engine()
        age = health.step_age_s
        return {
            "engine": str(health.state),
            "busy": health.is_busy,
            "step_age_s": None if age is None else round(age, 3),
        }
