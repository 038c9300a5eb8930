"""The best match is the one that comparing with every earlier request finds."""

import random
from pathlib import Path

import pytest

from ramify.analysis import lint
from ramify.analysis.corpus import Corpus
from ramify.analysis.linting import learn_templates
from ramify.analysis.predecessor import PredecessorFinder
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind
from tests.pure.analysis import contract_log

WORDS = (
    "the depot parcel route answer never always customer invoice delay region order polite".split()
)


def prose(rng: random.Random, num_words: int) -> str:
    return " ".join(
        rng.choice(WORDS) + rng.choice(["", "", "", ".", "\n"]) for _ in range(num_words)
    )


def random_log(seed: int) -> list[LoggedRequest]:
    """Conversations of a few apps with clocks and ids, and with tenants."""
    rng = random.Random(seed)
    systems = [prose(rng, 60) for _ in range(3)]
    talks: list[tuple[int, list[str]]] = []
    requests = []
    for line in range(1, 31):
        if not talks or rng.random() < 0.4:
            talks.append((rng.randrange(3), [prose(rng, 20)]))
        app, texts = rng.choice(talks)
        clock = f"Time: 2026-03-04 10:{line:02d}:11\n" if app == 1 else ""
        segments = [Segment("system", SegmentKind.SYSTEM, clock + systems[app])]
        segments += [
            Segment(f"messages[{n}]", SegmentKind.MESSAGE, text, label=("user", "assistant")[n % 2])
            for n, text in enumerate(texts)
        ]
        requests.append(LoggedRequest("log", line, segments=tuple(segments), start_s=60.0 * line))
        texts += [prose(rng, 15), prose(rng, 12)]
    return requests


@pytest.mark.parametrize("seed", range(6))
def test_no_earlier_request_would_share_more(seed: int) -> None:
    """Of all earlier requests, none shares more than a page more when mended, nor a longer raw prefix."""
    corpus = Corpus()
    for request in random_log(seed):
        corpus.add(request)
    matcher = PredecessorFinder(corpus, learn_templates(corpus))

    for match in matcher.matches(corpus):
        earlier = corpus.requests[: match.request.number]
        compared = [(matcher.comparer.compare(item, match.request), item) for item in earlier]
        deepest = max((comparison.mended_tokens for comparison, _ in compared), default=0)
        tied = [pair for pair in compared if pair[0].mended_tokens >= deepest - 16]
        if not deepest:
            assert match.match is None
            continue
        best = max(tied, key=lambda pair: (pair[0].text_tokens, pair[1].number))[1]
        assert match.match is not None
        assert match.match.number == best.number


def test_a_request_in_flight_is_no_match() -> None:
    """What has not answered when a request starts cannot be read; it is named as parallel."""
    text = "You are a careful assistant of a shipping company. " * 200
    segments = (
        Segment("system", SegmentKind.SYSTEM, text),
        Segment("messages[0]", SegmentKind.MESSAGE, "Hi", label="user"),
    )
    times = [(0.0, 5.0), (1.0, 6.0), (8.0, 9.0)]

    report = lint(
        [
            LoggedRequest(
                "log", n + 1, segments=segments, start_s=start, end_s=end, provider="openai"
            )
            for n, (start, end) in enumerate(times)
        ]
    )

    assert [verdict.best_match_line for verdict in report.verdicts] == [None, None, 2]
    assert "parallel_cold" in {str(cause.cause) for cause in report.verdicts[1].causes}


def test_start_times_order_the_log_not_its_lines() -> None:
    """A request that is logged first but starts last is matched with the one before it."""
    text = "You are a careful assistant. " * 50
    late, early = (
        LoggedRequest(
            "log", line, segments=(Segment("system", SegmentKind.SYSTEM, text),), start_s=start
        )
        for line, start in ((1, 50.0), (2, 10.0))
    )

    report = lint([late, early])

    assert [verdict.best_match_line for verdict in report.verdicts] == [2, None]


def test_of_lines_with_one_length_the_same_are_looked_up() -> None:
    """A block of equally long lines that moves on: requests find their earlier ones, whatever the hash seed."""
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(300)]
    rows = [[" ".join(rng.choices(words, k=8)) for _ in range(24)] for _ in range(20)]
    first = [[("user", "\n".join(lines))] for lines in rows]
    later = [
        [
            ("user", "\n".join(lines[12:])),
            ("assistant", f"Answer {n:02d} to the question."),
            ("user", "\n".join([*lines[:12], f"Question {n:02d}, the next one?"])),
        ]
        for n, lines in enumerate(rows)
    ]
    requests = [
        LoggedRequest(
            "log",
            line,
            segments=tuple(
                Segment(f"messages[{at}]", SegmentKind.MESSAGE, text, label=role)
                for at, (role, text) in enumerate(messages)
            ),
        )
        for line, messages in enumerate([*first, *later], 1)
    ]

    verdicts = lint(requests).verdicts

    best = [verdict.best_match_line for verdict in verdicts[20:]]
    assert sum(line == earlier for line, earlier in zip(best, range(1, 21), strict=True)) == 19


def test_equal_text_of_another_tenant_is_the_longest_prefix() -> None:
    """Requests of one tenant each: the one with the same white space is best, however old."""
    rules = prose(random.Random(1), 200)
    texts = [rules, *[rules.replace(" ", "  ", 1)] * 12, rules]

    report = lint(
        LoggedRequest(
            "log",
            line,
            segments=(
                Segment("system", SegmentKind.SYSTEM, text),
                Segment("messages[0]", SegmentKind.MESSAGE, f"{line}?", label="user"),
            ),
            cache_scope=f"tenant {line}",
        )
        for line, text in enumerate(texts, 1)
    )

    assert report.verdicts[-1].best_match_line == 1
    assert [str(cause.cause) for cause in report.verdicts[-1].causes] == ["namespace_split"]


def test_a_block_hops_over_calls_while_others_ask(tmp_path: Path) -> None:
    """Items of an answer stand between the message that had the block and the one that has it now."""
    memory = "<memory>\nThe customer likes short answers.\nThe depot is in Bremen.\n</memory>"
    calls = [
        {"type": "function_call", "call_id": f"c{n}", "name": "read", "arguments": f'{{"n":{n}}}'}
        for n in range(4)
    ]
    texts = [[{"type": "input_text", "text": text}] for text in (memory, contract_log.MORE[:300])]
    first, newest = (
        contract_log.message("user", [*texts[0], *texts[1]]),
        contract_log.message("user", texts[0]),
    )
    inputs = [
        [first],
        *(
            [contract_log.message("user", f"{item} asks for bread?")]
            for item in contract_log.WORDS[:6]
        ),
        [contract_log.message("user", texts[1]), *calls, newest],
    ]

    verdict = contract_log.verdicts(
        tmp_path,
        *({"model": "gpt-5", "instructions": contract_log.RULES, "input": item} for item in inputs),
    )[7]

    assert (verdict["best_match_line"], contract_log.causes(verdict)) == (1, ["context_moved"])
