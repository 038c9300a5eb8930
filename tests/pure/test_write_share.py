"""What copies to the tiers may take of the steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.write_share import LAZY_BYTES, SHARE, WriteShare
from tests.budget import examples

PAGE_BYTES = 1 << 18
MAX_PAGES = LAZY_BYTES // PAGE_BYTES


@settings(max_examples=examples(100))
@given(
    steps=st.lists(st.floats(1e-4, 0.5), min_size=50, max_size=200),
    copy_s=st.floats(1e-6, 5e-3),
    write_s=st.floats(1e-6, 5e-3),
)
def test_copies_take_no_more_than_their_share(
    steps: list[float], copy_s: float, write_s: float
) -> None:
    """Once the cost of a page is measured, over any run of steps; pages wait at all times."""
    share = WriteShare(PAGE_BYTES)
    for _ in range(100):  # of an engine before
        share.add_step(10.0)
        share.copied(1, copy_s)
        share.written(write_s)
    limit_s = SHARE * sum(steps) + MAX_PAGES * (copy_s + write_s)

    spent_s = 0.0
    for seconds in steps:
        share.add_step(seconds)
        count = share.num_pages
        assert count <= MAX_PAGES
        share.copied(count, count * copy_s)
        for _ in range(count):
            share.written(write_s)
        spent_s += count * (copy_s + write_s)

    assert spent_s <= limit_s * 1.01


def test_a_page_larger_than_a_step_allows_is_copied_in_the_end() -> None:
    """A page of 8 MiB, which takes 8 ms, beside steps of 5 ms."""
    share = WriteShare(8 << 20)
    counts = []
    for _ in range(200):
        share.add_step(0.005)
        counts.append(share.num_pages)
        share.copied(share.num_pages, 0.004)
        if counts[-1]:
            share.written(0.004)

    assert set(counts) == {0, 1}
    assert sum(counts) == pytest.approx(SHARE * 200 * 0.005 / 0.008, abs=1.5)


def test_a_long_wait_does_not_let_copies_pile_up() -> None:
    """What a step of a minute leaves is a step's pages."""
    share = WriteShare(PAGE_BYTES)
    share.add_step(60.0)

    assert share.num_pages == MAX_PAGES
    share.copied(MAX_PAGES, 1e-4)
    assert share.num_pages == 0


def test_pages_that_cost_more_than_was_left_are_paid_for_first() -> None:
    """Those of a store beyond a network come on top; no negative number of pages follows."""
    share = WriteShare(PAGE_BYTES)
    share.add_step(60.0)
    share.copied(10 * MAX_PAGES, 1.0)

    assert share.num_pages == 0
