"""What an engine is doing and has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ramify.cache.types import CacheStats
from ramify.engine.core import EngineCore


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Requests now, and work since the engine was made."""

    num_running: int  # each of several answers to a prompt counts
    num_waiting: int
    num_steps: int
    num_computed_tokens: int  # query rows of all steps: of prompts, of answers, of guesses
    num_preemptions: int
    cache: CacheStats

    @classmethod
    def of(cls, core: EngineCore) -> EngineStats:
        """Those of an engine at this moment; for the thread that drives it."""
        scheduler = core.scheduler
        return cls(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_steps=core.num_steps,
            num_computed_tokens=core.num_computed_tokens,
            num_preemptions=scheduler.num_preemptions,
            cache=core.cache.stats(),
        )
