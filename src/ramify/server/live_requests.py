"""`LiveRequests`: what waits and runs now, for the tenant that sent it and the operator."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from ramify.server.generation import Generation


@dataclass(slots=True)
class LiveRequest:
    """A request between its arrival at the engine and its end."""

    number: int
    tenant: str
    num_prompt: int
    max_tokens: int | None  # of its answer
    arrival_s: float
    num_answers: int = 1
    is_background: bool = False  # a line of a batch
    generation: Generation | None = None  # since its first token

    def as_json(self, now_s: float) -> dict[str, Any]:
        """What the page shows of it: counts, no text."""
        payload: dict[str, Any] = {
            "id": None if self.generation is None else self.generation.id,
            "tenant": self.tenant,
            "state": "waiting" if self.generation is None else "running",
            "age_s": round(now_s - self.arrival_s, 3),
            "prompt_tokens": self.num_prompt,
            "max_tokens": self.max_tokens,
        }
        generation = self.generation
        if generation is not None:
            payload["output_tokens"] = generation.num_output
            if (usage := generation.cache) is not None:
                payload |= {"read": usage.read, "shared": usage.shared, "computed": usage.computed}
            if generation.placement is not None:
                payload["replica"] = generation.placement.replica
        return payload


class LiveRequests:
    """The live requests of a server.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: dict[int, LiveRequest] = {}
        self._begun: dict[str, int] = {}  # id of a response → number of its request
        self._numbers = count()
        self._num_live = Counter[str | None]()  # by tenant; None: all
        self._num_running = Counter[str | None]()  # those with a token
        # Of requests that somebody waits for: those without a token, and answers of all.
        self.num_foreground_waiting = self.num_foreground_answers = 0
        self.on_change: Callable[[], None] = lambda: None

    def arrive(
        self,
        tenant: str,
        *,
        num_prompt: int,
        max_tokens: int | None,
        num_answers: int = 1,
        is_background: bool = False,
    ) -> LiveRequest:
        """Count a request; `withdraw`, or `begin` and `end`, must follow.

        Args:
            num_answers: that it computes at once.
            is_background: nobody waits for it.
        """
        number = next(self._numbers)
        request = LiveRequest(
            number, tenant, num_prompt, max_tokens, self._clock(), num_answers, is_background
        )
        self._requests[number] = request
        self._count(self._num_live, tenant, 1)
        self._count_foreground(request, waiting=1, answers=num_answers)
        return request

    def withdraw(self, request: LiveRequest) -> None:
        """A request was refused, or its client left before its first token."""
        if self._requests.pop(request.number, None) is not None:
            self._count(self._num_live, request.tenant, -1)
            self._count_foreground(request, waiting=-1, answers=-request.num_answers)

    def begin(self, request: LiveRequest, generation: Generation) -> float:
        """A request has its first token; returns the seconds since it arrived."""
        request.generation = generation
        self._begun[generation.id] = request.number
        self._count(self._num_running, request.tenant, 1)
        self._count_foreground(request, waiting=-1)
        return self._clock() - request.arrival_s

    def end(self, generation: Generation) -> None:
        """A request that had begun has ended. Idempotent."""
        number = self._begun.pop(generation.id, None)
        if number is not None:
            request = self._requests.pop(number)
            self._count(self._num_live, request.tenant, -1)
            self._count(self._num_running, request.tenant, -1)
            self._count_foreground(request, answers=-request.num_answers)

    def _count(self, counts: Counter[str | None], tenant: str, by: int) -> None:
        for scope in (tenant, None):
            counts[scope] += by
            if not counts[scope]:
                del counts[scope]

    def _count_foreground(
        self, request: LiveRequest, *, waiting: int = 0, answers: int = 0
    ) -> None:
        if not request.is_background:
            self.num_foreground_waiting += waiting
            self.num_foreground_answers += answers
            self.on_change()

    def num_running(self, tenant: str | None) -> int:
        """How many of a tenant, or, with None, of all, have a token."""
        return self._num_running[tenant]

    def num_waiting(self, tenant: str | None) -> int:
        """How many have none yet."""
        return self._num_live[tenant] - self._num_running[tenant]

    def of(self, tenant: str | None) -> Iterator[LiveRequest]:
        """Those of a tenant, or, with None, all; oldest first."""
        for request in self._requests.values():
            if tenant in (None, request.tenant):
                yield request

    def as_json(self, tenant: str | None, most: int) -> dict[str, Any]:
        """How many run and wait, and the oldest of them."""
        now_s = self._clock()
        return {
            "running": self.num_running(tenant),
            "waiting": self.num_waiting(tenant),
            "requests": [request.as_json(now_s) for request in islice(self.of(tenant), most)],
        }
