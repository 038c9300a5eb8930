"""Edges of long prompts are views of their keys: no copy, and little unused memory kept alive."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import CacheKey, PrefixCache, RadixTree
from ramify.cache.packed import MIN_VIEW_BYTES, piece
from tests.budget import examples
from tests.pure.cache_traffic import Traffic

LONG = 1024  # tokens in a page: a single one is long enough for a view


def views(tree: RadixTree) -> list[memoryview]:
    """Return the edges that are memoryviews."""
    edges = (tree.edges[node] for node in tree.nodes())
    return [edge for edge in edges if isinstance(edge, memoryview)]


def test_a_long_prompt_is_not_copied() -> None:
    """A long cached prompt is a view of its key's buffer, also after a split near the start."""
    cache = PrefixCache(128, 16, log_every=0)
    key = CacheKey(range(1, 2000))

    cache.release(cache.publish(cache.acquire(key), key, cache.reserve(125)))
    (whole,) = views(cache._tree)
    right = CacheKey([*range(1, 65), *[7] * 16])
    cache.release(cache.acquire(right))

    assert whole.obj is key.atoms
    assert [(view.obj is key.atoms, len(view)) for view in views(cache._tree)] == [(True, 120 * 64)]
    cache.check()


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_a_view_is_most_of_what_it_keeps_alive(length: int, left: int, right: int) -> None:
    """`piece` returns the right bytes; a view spans at least three quarters of its buffer."""
    unit = MIN_VIEW_BYTES // 16
    atoms = bytes(range(256)) * length
    begin, end = sorted((min(left, length), min(right, length)))

    first = piece(atoms, begin * unit, end * unit)
    second = piece(first, 0, len(first) // 2)

    assert (first, second) == (atoms[begin * unit : end * unit], first[: len(first) // 2])
    for cut in (first, second):
        if isinstance(cut, memoryview):
            assert 4 * len(cut) >= 3 * length * unit
            assert len(cut) >= MIN_VIEW_BYTES
        else:
            assert cut is atoms or 4 * len(cut) < max(3 * length * unit, 4 * MIN_VIEW_BYTES)


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32), st.sampled_from([None, 6, 0]))
def test_prompts_of_long_pages_break_no_invariant(seed: int, ghost_pages: int | None) -> None:
    """Random traffic on long pages keeps the invariants when any edge may be a view."""
    cache = PrefixCache(12, LONG, ghost_pages=ghost_pages, log_every=0)
    tree, traffic = cache._tree, Traffic(cache, Random(seed))

    for _ in traffic.run(30):
        cache.check()
        for view in views(tree):
            assert 4 * len(view) >= 3 * len(bytes(view.obj))
        for user in traffic.live:
            nodes = tree.path(user.lease.node)
            assert b"".join(tree.edge(node) for node in nodes) == user.lease.key.atoms
