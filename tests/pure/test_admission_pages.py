"""Admissions that do not fit beside cached pages which other admissions of the step read."""

import pytest

from tests.pure.engine_bench import Bench, expected

WARM = [7] * 400  # 100 of 200 pages


@pytest.mark.parametrize("num_warm", [1, 5])
def test_a_large_prompt_is_not_thrown_out_for_the_pages_of_a_warm_one(num_warm: int) -> None:
    """The warm prompts behind it need a page each, but pin 100 that it needs: they wait."""
    bench = Bench(800, 4, max_num_seqs=16)
    bench.add(WARM, max_tokens=1)
    bench.run()
    bench.add([3] * 4, max_tokens=200, ignore_eos=True)
    for _ in range(3):
        bench.step()

    cold = bench.add([9] * 395, priority=1, max_tokens=4, ignore_eos=True)
    warm = [bench.add([*WARM, 1 + at], max_tokens=4, ignore_eos=True) for at in range(num_warm)]
    for _ in range(12):
        bench.step()

    assert list(bench.outputs[cold].token_ids) == expected([9] * 395, 4, ends=())
    outputs = bench.run()
    for at, request_id in enumerate(warm):
        assert list(outputs[request_id].token_ids) == expected([*WARM, 1 + at], 4, ends=())
