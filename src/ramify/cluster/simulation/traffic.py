"""Generated traffic: conversations with shared system prompts, and agents that call tools."""

from __future__ import annotations

import random
from itertools import count

from ramify.analysis.simulation.page_trace import PageTrace, PageTraceBuilder

PAGE_SIZE = 16
# Of an answer at 50 tokens/s: a session goes on when it has the answer, whatever the fleet does.
OUTPUT_TOKEN_S = 0.02


def conversations(num_conversations: int, per_s: float, seed: int = 0) -> PageTrace:
    """Conversations of 1 to 12 turns behind one of 20 system prompts, 5 to 60 s after an answer."""
    return sessions(
        num_conversations,
        per_s,
        seed,
        turns=(1, 12),
        pause_s=(5.0, 60.0),
        system=(16, 128),
        question=(4, 40),
    )


def agents(num_agents: int, per_s: float, seed: int = 0) -> PageTrace:
    """Agents of 10 to 40 calls behind one of 20 sets of tools, 0.5 to 5 s after an answer."""
    return sessions(
        num_agents,
        per_s,
        seed,
        turns=(10, 40),
        pause_s=(0.5, 5.0),
        system=(200, 600),
        question=(5, 60),
    )


def sessions(
    num_sessions: int,
    per_s: float,
    seed: int,
    *,
    turns: tuple[int, int],
    pause_s: tuple[float, float],
    system: tuple[int, int],
    question: tuple[int, int],
    answer: tuple[int, int] = (2, 16),
    num_systems: int = 20,
) -> PageTrace:
    """Sessions that grow by a question and an answer each turn; ranges are inclusive, and in pages.

    They begin as a Poisson process, behind a system prompt of Zipf's distribution.
    """
    rng = random.Random(seed)  # noqa: S311 - traffic, no secrets
    ids, builder = count(), PageTraceBuilder(PAGE_SIZE)
    systems = [[next(ids) for _ in range(rng.randint(*system))] for _ in range(num_systems)]
    weights = [1 / rank for rank in range(1, num_systems + 1)]
    start_s = 0.0
    for _ in range(num_sessions):
        start_s += rng.expovariate(per_s)
        pages = list(rng.choices(systems, weights)[0])
        now_s = start_s
        for _ in range(rng.randint(*turns)):
            pages += [next(ids) for _ in range(rng.randint(*question))]
            num_prompt, num_answer = len(pages), rng.randint(*answer)
            pages += [next(ids) for _ in range(num_answer)]
            builder.add(
                pages,
                num_tokens=num_prompt * PAGE_SIZE + rng.randrange(PAGE_SIZE),
                num_lookup_pages=num_prompt,
                num_output=num_answer * PAGE_SIZE,
                start_s=now_s,
            )
            now_s += num_answer * PAGE_SIZE * OUTPUT_TOKEN_S + rng.uniform(*pause_s)
    return builder.build()
