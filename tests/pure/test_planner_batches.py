"""Batches that mix prefill chunks, decodes, drafts and cached prefixes."""

from itertools import permutations

import numpy as np
import pytest

from tests.pure.planner_bench import Bench, pages_of, sequence_of


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16])
def test_first_chunks_later_chunks_decode_and_drafts_are_one_batch(
    page_size: int, num_drafts: int
) -> None:
    """Every request has its own number of cached and new tokens, from none to many."""
    bench = Bench(num_pages=300, page_size=page_size)
    bench.warm(range(100, 140))
    later, decode, draft = (
        sequence_of(range(50)),
        sequence_of(range(60, 90)),
        sequence_of(range(200, 221)),
    )
    bench.run(later, decode, draft, num_new=[17, 30, 21])
    cold, warm = sequence_of(range(300, 333)), sequence_of([*range(100, 140), *range(400, 420)])
    decode.tokens.append(7)
    draft.tokens.extend(range(500, 500 + num_drafts))
    batch = [cold, later, decode, warm, draft]
    limits = [10, 20, 1, 13, num_drafts]
    read = 40 // page_size * page_size

    arrays = bench.plan(*batch, num_new=limits)

    assert arrays.num_cached.tolist() == [0, 17, 30, read, 21]
    assert np.diff(arrays.cu_seqlens_q).tolist() == limits
    assert arrays.seq_lens_kv.tolist() == [10, 37, 31, read + 13, 21 + num_drafts]
    assert arrays.positions.tolist() == [
        position
        for cached, new in zip(arrays.num_cached.tolist(), limits, strict=True)
        for position in range(cached, cached + new)
    ]
    assert arrays.num_cached.any()
    assert (arrays.max_q_len, arrays.total_kv) == (max(limits), int(arrays.seq_lens_kv.sum()))
    for sequence, pages in zip(batch, arrays.block_table, strict=True):
        expected = pages_of(bench, sequence)
        assert pages[: len(expected)].tolist() == expected
        assert (pages[len(expected) :] == -1).all()
    assert len(set(arrays.slot_mapping.tolist())) == sum(limits)
    bench.execute(arrays, *batch)
    kept = [10, 20, 1, 13, num_drafts - 1]  # a draft is rejected
    bench.planner.commit(batch, kept)
    del draft.tokens[20 + num_drafts :]
    draft.tokens.append(8)
    bench.run(*[sequence for sequence in batch if sequence.num_uncomputed])
    bench.planner.release(batch)
    bench.assert_nothing_leaked()


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16])
def test_what_extends_a_cached_prefix_is_published(page_size: int) -> None:
    """A prompt with a cached prefix publishes its own tokens, step by step."""
    bench = Bench(num_pages=100, page_size=page_size)
    bench.warm(range(40))
    sequence = sequence_of(range(60))

    bench.run(sequence, num_new=[5])
    bench.run(sequence)
    sequence.tokens.extend(range(60, 80))
    bench.run(sequence)
    bench.planner.release([sequence])

    whole = 80 // page_size * page_size
    assert sequence.released
    assert bench.cache.match(sequence_of(range(81)).key(81)).num_tokens == whole
    assert bench.cache.stats().cached_pages == whole // page_size
    reader = sequence_of(range(90))
    bench.run(reader)
    assert reader.num_read == whole


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("together", [True, False])
def test_nested_and_identical_prompts_commit_in_every_order(page_size: int, together: bool) -> None:
    """A, A, A+B, A+B+C, A+B+C: in all 120 orders every page is cached once and is right."""
    for order in permutations(range(5)):
        bench = Bench(num_pages=60, page_size=page_size)
        lengths = (5, 5, 9, 13, 13)
        batch = [sequence_of(range(length)) for length in lengths]
        bench.execute(bench.plan(*batch), *batch)

        if together:
            bench.planner.commit([batch[index] for index in order])
        else:
            for index in order:
                bench.planner.commit([batch[index]])

        bench.cache.check()
        assert bench.cache.stats().cached_pages == 13 // page_size
        canonical = pages_of(bench, batch[3])
        for sequence, length in zip(batch, lengths, strict=True):
            whole = length // page_size
            assert pages_of(bench, sequence)[:whole] == canonical[:whole]
            sequence.tokens.append(90)
        bench.run(*batch)
        bench.planner.release(batch)
        bench.assert_nothing_leaked()
