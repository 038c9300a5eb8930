"""Several turns of several prompts on one engine, compared bit by bit with every prompt alone."""

import random
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from tests.cpu.engine_cases import Engine, Model, Prompt, Sizes, differences


@dataclass(frozen=True)
class Ask:
    """A prompt, stem and tail, or an earlier ask with its answer and a new tail."""

    stem: int
    stem_len: int
    tail: int
    tail_len: int
    num_new: int
    follows: int | None = None  # number of an ask of an earlier turn, continued with its answer


@dataclass(frozen=True)
class Turn:
    asks: tuple[Ask, ...]
    clear: bool = False  # forget everything before it


@dataclass(frozen=True)
class Scenario:
    sizes: Sizes  # its num_pages counts beyond what the largest request needs
    turns: tuple[Turn, ...]


@dataclass
class Outcome:
    """What a scenario showed: the rows that differ, and what happened on the way."""

    differences: list[str]
    num_rows: int = 0  # of logits
    num_kv_tokens: int = 0  # whose K/V was compared
    preemptions: int = 0
    evicted_pages: int = 0
    released_pages: int = 0  # outside the window, of live requests
    read_tokens: int = 0
    shared_tokens: int = 0


def tokens(seed: int, count: int) -> Prompt:
    return tuple(random.Random(seed).choices(range(3, 290), k=count))


def longest(scenario: Scenario) -> int:
    """Tokens of its largest request, prompt and answer."""
    totals: list[int] = []
    for turn in scenario.turns:
        earlier = totals[:]
        for ask in turn.asks:
            begin = ask.stem_len
            if ask.follows is not None and earlier:
                begin = earlier[ask.follows % len(earlier)]
            totals.append(begin + ask.tail_len + ask.num_new)
    return max(totals)


def compare(model: Model, scenario: Scenario, *, least_pages: int | None = None) -> Outcome:
    """Run the scenario on one engine and every prompt of it, with its answer, alone.

    Args:
        least_pages: pages of the pool besides `scenario.sizes.num_pages`; by default those of the
            longest request.
    """
    sizes = scenario.sizes
    if least_pages is None:
        least_pages = -(-longest(scenario) // sizes.page_size)
    engine = Engine(model, replace(sizes, num_pages=least_pages + sizes.num_pages))
    outcome = Outcome([])
    wholes: list[Prompt] = []  # prompts and answers of earlier turns
    for number, turn in enumerate(scenario.turns):
        if turn.clear:
            engine.core.cache.clear()
        prompts = []
        for ask in turn.asks:
            stem = tokens(ask.stem, ask.stem_len)
            if ask.follows is not None and wholes:
                stem = wholes[ask.follows % len(wholes)]
            prompts.append(stem + tokens(1000 + ask.tail, ask.tail_len))
        answers = engine.generate(prompts, [ask.num_new for ask in turn.asks])
        for prompt, (output, logits) in zip(prompts, answers, strict=True):
            wholes.append(prompt + output.token_ids)
            kv, pages = engine.cached_kv(wholes[-1]), engine.cached_pages(wholes[-1])
            released = [i for i, page in enumerate(pages) if page == engine.core.cache.num_pages]
            first_kv = (max(released, default=-1) + 1) * sizes.page_size
            for wrong in differences(model, prompt, output.token_ids, logits, kv, first_kv):
                outcome.differences.append(f"turn {number}, {len(prompt)} tokens: {wrong}")
            outcome.num_kv_tokens += len(kv)
            outcome.num_rows += len(logits)
            outcome.read_tokens += output.cache.read_tokens
            outcome.shared_tokens += output.cache.shared_tokens
    outcome.preemptions = engine.core.scheduler.num_preemptions
    outcome.evicted_pages = engine.core.cache.stats().evicted_pages
    outcome.released_pages = engine.core.cache.stats().evictions["window"]
    return outcome


# -- any scenario -----------------------------------------------------------------------------

SHORT, LONG = st.integers(1, 70), st.integers(200, 300)
ASKS = st.builds(
    Ask,
    stem=st.integers(0, 1),
    stem_len=st.one_of(SHORT, LONG),
    tail=st.integers(0, 3),
    tail_len=st.one_of(st.integers(1, 9), st.integers(10, 40)),
    num_new=st.integers(1, 5),
    follows=st.one_of(st.none(), st.integers(0, 5)),
)
TURNS = st.builds(
    Turn,
    asks=st.lists(ASKS, min_size=1, max_size=5).map(tuple),
    clear=st.sampled_from([False, False, False, True]),
)
SIZES = st.builds(
    Sizes,
    page_size=st.sampled_from([1, 2, 3, 5, 16, 64]),
    num_pages=st.one_of(st.integers(0, 6), st.integers(7, 400)),
    max_batch_tokens=st.one_of(st.integers(9, 40), st.sampled_from([64, 100, 256, 4096])),
    max_num_seqs=st.integers(1, 6),
    prefix_cache=st.sampled_from([True, True, True, False]),
)
MIXED = st.builds(Scenario, sizes=SIZES, turns=st.lists(TURNS, min_size=2, max_size=3).map(tuple))
# requests that start small and grow in a pool with room for little more than one: preemption
GROWING = st.builds(
    Ask,
    stem=st.integers(0, 2),
    stem_len=st.integers(1, 20),
    tail=st.integers(0, 3),
    tail_len=st.integers(1, 9),
    num_new=st.integers(4, 12),
    follows=st.one_of(st.none(), st.integers(0, 5)),
)
PRESSED = st.builds(
    Scenario,
    sizes=st.builds(
        Sizes,
        page_size=st.sampled_from([1, 2, 3, 5, 16]),
        num_pages=st.integers(0, 8),
        max_batch_tokens=st.integers(4, 70),
        max_num_seqs=st.integers(3, 6),
        prefix_cache=st.sampled_from([True, True, True, False]),
    ),
    turns=st.lists(
        st.builds(Turn, asks=st.lists(GROWING, min_size=3, max_size=6).map(tuple)),
        min_size=1,
        max_size=2,
    ).map(tuple),
)


SCENARIOS = st.one_of(MIXED, PRESSED)

# -- one that is known to share, to read, and to be continued ---------------------------------


def asks(*lengths: tuple[int, int], num_new: int = 4) -> tuple[Ask, ...]:
    """Prompts of one stem with tails of their own, by (stem length, tail length)."""
    return tuple(
        Ask(0, stem_len, index, tail_len, num_new)
        for index, (stem_len, tail_len) in enumerate(lengths)
    )


FIRST = asks((265, 3), (265, 31), (140, 17), (1, 6))
AGAIN = (*FIRST[:2], Ask(0, 270, 7, 9, 4), *(Ask(0, 0, 8, 11, 4, follows=i) for i in range(3)))
