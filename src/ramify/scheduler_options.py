"""Options of the scheduler: limits of a step and of the queue, and whether steps overlap."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from ramify.errors import ConfigError

OVERLAP: Final = ("auto", "on", "off")


def _option(default: Any, help: str) -> Any:  # noqa: A002 - the word of typer and argparse
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSection:
    """Limits of a step, and of the queue.

    `coalesce_steps` defers new prompts for up to this many decode steps, until the waiting prompts
    fill a step. It helps where short prompts trickle in while others decode: a step with one short
    prompt costs almost as much as a step with several, and delays every decode. The price is a first
    token that comes up to this many steps later.
    """

    # with more, a step on a few cores only gets longer, not more efficient
    max_num_seqs: int = _option(
        64,
        "Most requests that run at once.",
    )
    # GEMMs are near their peak, and a decode step waits for one chunk
    max_batch_tokens: int = _option(
        512,
        "Most new tokens per step. Longer prompts are computed in chunks of this size.",
    )
    coalesce_steps: int = _option(
        0,
        "Hold new prompts back for at most this many decode steps until they fill a "
        "step. 0: never. Helps where many short prompts arrive during decode; delays "
        "their first token.",
    )
    # a step takes 10 ms to a second on CPUs; a preemption costs less than a page of recomputed tokens
    fair_wait_steps: int = _option(
        8,
        "Steps after which a waiting tenant with nothing running preempts a request of the tenant with "
        "most; that request goes on later with the same tokens. 0: never.",
    )
    # on a CPU the step computes with the same cores that would plan the next one
    overlap: str = _option(
        "auto",
        "Plan a step while the one before it computes: `auto` (on a device that works by itself, not on a "
        "CPU), `on` or `off`. Never changes a token. Steps with new requests, drafts, grammars or penalties "
        "wait for the one before; with cache tiers all do.",
    )
    max_waiting: int | None = _option(
        None,
        "Most sequences that may wait (`n` counts each). When that many wait, a request is refused, unless its "
        "tenant has less than an equal share of the queue. `None`: no limit.",
    )
    # more would wait for minutes
    max_waiting_tokens: int | None = _option(
        None,
        "Most prompt tokens that may wait; an empty queue takes any prompt. `None`: four times the "
        "K/V pool if `max_waiting` is set, else no limit.",
    )

    def check_overlap(self, *, speculative: str, has_tiers: bool) -> None:
        """Check that `overlap="on"` can begin a step ahead.

        Args:
            speculative: the option of that name.

        Raises:
            ConfigError: drafts or cache tiers keep every step from that.
        """
        if self.overlap != "on":
            return
        reason = ""
        if speculative != "off":
            reason = f"speculative={speculative!r}: drafts follow the last token"
        elif has_tiers:
            reason = "cache tiers: their threads write to pages between two steps"
        if reason:
            raise ConfigError(f"overlap='on' does nothing with {reason}; leave one of the two out")
