"""Hashed prompts have a best match: the longest prefix of whole blocks, the newest on a tie."""

from hypothesis import given

from ramify.analysis.linting import lint
from ramify.analysis.records import HashedPrompt, LoggedRequest
from tests.pure.analysis.simulated_traces import PATHS, hashed_request

BLOCK = 4


def request(line: int, *blocks: int, scope: str = "", tail: int = 1) -> LoggedRequest:
    prompt = HashedPrompt(BLOCK, blocks, BLOCK * (len(blocks) - 1) + tail)
    return LoggedRequest("log", line, hashed=prompt, cache_scope=scope)


def test_the_longest_prefix_then_the_newest_request_is_the_match() -> None:
    """Lines 1 and 2 share two blocks with line 4, line 3 only one."""
    log = [
        request(1, 7, 8, 9),
        request(2, 7, 8, 10),
        request(3, 7, 11, 12),
        request(4, 7, 8, 13),
    ]

    report = lint(log)
    verdicts = report.verdicts

    assert report.quality["is_exact"]  # lengths are the log's own
    assert [verdict.best_match_line for verdict in verdicts] == [None, 1, 2, 2]
    assert [verdict.tokens.reusable for verdict in verdicts] == [0, 8, 4, 8]
    assert all(v.tokens.lost == 0 and v.divergence is None and not v.causes for v in verdicts)


def test_a_last_block_that_is_not_full_is_not_shared() -> None:
    """Its tokens are known of neither prompt."""
    verdicts = lint([request(1, 1, 2, tail=3), request(2, 1, 2, tail=3)]).verdicts

    assert verdicts[1].tokens.reusable == BLOCK
    assert verdicts[1].tokens.total == BLOCK + 3


def test_scopes_and_the_order_of_starts_are_kept() -> None:
    """Another tenant shares nothing."""
    verdicts = lint([request(1, 1, 2, scope="a"), request(2, 1, 2, scope="b")]).verdicts

    assert verdicts[1].best_match_line is None and verdicts[1].tokens.reusable == 0


@given(PATHS)
def test_shared_tokens_equal_those_of_all_pairs(paths: list[tuple[int, ...]]) -> None:
    """Compared with the longest common prefix with every earlier prompt."""
    log = [hashed_request(path, number) for number, path in enumerate(paths)]
    prompts = [item.hashed for item in log if item.hashed is not None]

    verdicts = lint(log).verdicts

    for at, (prompt, verdict) in enumerate(zip(prompts, verdicts, strict=True)):
        mine = prompt.block_ids[: prompt.num_tokens // prompt.block_size]
        lengths = [
            next(
                (n for n, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b),
                min(len(mine), len(other)),
            )
            for earlier in prompts[:at]
            for other in [earlier.block_ids[: earlier.num_tokens // earlier.block_size]]
        ]
        assert verdict.tokens.reusable == prompt.block_size * max(lengths, default=0)
