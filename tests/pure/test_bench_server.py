"""The arithmetic behind `make bench-server`: metrics, client figures, seeds, commands, tables."""

import random
from pathlib import Path
from typing import Any

import pytest
from servers.cells import CELLS, in_order
from servers.chats import document
from servers.contract import (
    ClientFigures,
    Kind,
    ModelFiles,
    Offline,
    OwnFigures,
    RequestTimes,
    Sample,
)
from servers.launches import SERVERS, launch
from servers.own_figures import own_figures, parse_metrics
from servers.report import TOKENS, TTFT, checks, goal_table, paired, table

SCRAPES = {
    Kind.RAMIFY: (
        """
# TYPE ramify_prompt_tokens_by_source_total counter
ramify_prompt_tokens_by_source_total{source="computed"} 30.0
ramify_prompt_tokens_by_source_total{source="read"} 60.0
ramify_prompt_tokens_by_source_total{source="shared in flight"} 10.0
ramify_time_to_first_token_seconds_bucket{le="+Inf"} 4.0
ramify_time_to_first_token_seconds_sum 2.0
ramify_time_to_first_token_seconds_count 4.0
ramify_inter_token_latency_seconds_sum 0.6
ramify_inter_token_latency_seconds_count 60
ramify_generation_tokens_total 64
""",
        OwnFigures(0.5, 0.01, 64, 0.7),
    ),
    Kind.VLLM: (
        """
vllm:prefix_cache_queries_total{engine="0",model_name="a b}"} 100
vllm:prefix_cache_hits_total{engine="0",model_name="a b}"} 25
vllm:time_to_first_token_seconds_sum{engine="0"} 3.0
vllm:time_to_first_token_seconds_count{engine="0"} 2
vllm:inter_token_latency_seconds_sum{engine="0"} 0
vllm:inter_token_latency_seconds_count{engine="0"} 0
vllm:generation_tokens_total{engine="0"} 1e1
vllm:kv_cache_usage_perc{engine="0"} NaN
""",
        OwnFigures(1.5, None, 10, 0.25),
    ),
    Kind.LLAMA: (
        """
llamacpp:prompt_tokens_total 75
llamacpp:prompt_tokens_cached_total 25
llamacpp:tokens_predicted_total 20
llamacpp:tokens_predicted_seconds_total 0.5
""",
        OwnFigures(None, 0.025, 20, 0.25),
    ),
}


def sample(
    tokens_per_s: float,
    ttft_s: float = 0.1,
    own_tokens: float = 100,
    offline_s: float | None = None,
    bound_s: float | None = None,
) -> Sample:
    """100 tokens at this rate."""
    client = ClientFigures(100 / tokens_per_s, 4, 400, 100, ttft_s, 0.2, 0.1, 0.01, 0.01)
    offline = None if offline_s is None else Offline(offline_s, offline_s)
    return Sample(client, OwnFigures(0.1, 0.01, own_tokens, 0.5), 1.0, 0.0, offline, bound_s)


@pytest.mark.parametrize("kind", SCRAPES)
def test_own_figures_are_the_difference_of_two_scrapes(kind: Kind) -> None:
    """What was counted before the cell does not matter; what a server does not count is None."""
    text, expected = SCRAPES[kind]
    after = parse_metrics(text)
    twice = {name: 2 * value for name, value in after.items()}

    for before, later in (({}, after), (after, twice)):
        figures = own_figures(kind, before, later)

        assert figures.ttft_mean_s == expected.ttft_mean_s
        assert figures.token_mean_s == pytest.approx(expected.token_mean_s)
        assert figures.output_tokens == expected.output_tokens
        assert figures.hit_rate == pytest.approx(expected.hit_rate)


def test_client_figures_of_requests() -> None:
    """Time per token is that after the first; the 99th percentile is a value that was measured."""
    requests = [RequestTimes(number / 100, number / 100 + 0.9, 50, 10) for number in range(1, 201)]

    figures = ClientFigures.of_requests(4.0, requests)

    assert figures.tokens_per_s == 500.0
    assert figures.prompt_tokens == 10_000
    assert (figures.ttft_median_s, figures.ttft_p99_s) == (1.005, 1.98)
    assert figures.token_median_s == pytest.approx(0.1)
    assert RequestTimes(0.5, 0.5, 10, 1).token_s == 0.0


def test_client_figures_of_vllm_bench_are_in_seconds() -> None:
    """Answers have the length that was wanted, whatever it counted of them."""
    result: dict[str, Any] = {
        "duration": 2.0,
        "completed": 3,
        "total_input_tokens": 30,
        "total_output_tokens": 14,
    }
    result |= {"median_ttft_ms": 100.0, "p99_ttft_ms": 300.0, "mean_ttft_ms": 150.0}
    result["itls"] = [[0.1] * 4, [0.2] * 4, [0.6]]  # an event may hold several tokens

    figures = ClientFigures.of_vllm_bench(result, 5)

    assert (figures.output_tokens, figures.tokens_per_s) == (15, 7.5)
    assert (figures.ttft_median_s, figures.ttft_p99_s, figures.ttft_mean_s) == (0.1, 0.3, 0.15)
    assert figures.token_median_s == pytest.approx(0.15)
    assert figures.token_mean_s == pytest.approx((0.1 + 0.2 + 0.15) / 3)


def test_cells_share_a_seed_only_with_the_cell_they_follow() -> None:
    """Else a prompt of another cell, or of another round, would be cached."""
    seeds = [
        (cell.seed(repetition), cell.after or cell.name)
        for cell in CELLS.values()
        for repetition in range(5)
    ]

    assert len({seed for seed, _ in seeds}) == len(set(seeds))
    assert len(set(seeds)) == 5 * len([cell for cell in CELLS.values() if not cell.after])


def test_a_cell_brings_the_cell_it_follows() -> None:
    """In the order of the tables, whatever the order of the arguments."""
    names = [cell.name for cell in in_order(["questions-again", "prefixes"])]

    assert names == ["prefixes", "questions", "questions-again"]


def test_questions_about_one_document() -> None:
    """The same document in both cells of a round, another in the next; every question is another."""

    def count_words(text: str) -> int:
        return len(text.split())

    first = CELLS["questions"].chats(5, count_words)
    again = CELLS["questions-again"].chats(5, count_words)
    other = CELLS["questions"].chats(6, count_words)

    assert first.system == again.system
    assert 2_100 <= count_words(first.system) < 2_140
    assert first.system.split("museum")[0] != other.system.split("museum")[0]
    assert len({*first.users, *again.users}) == first.num_requests + again.num_requests == 16
    assert len(first.openings()) == 8
    assert CELLS["conversations"].chats(5, count_words).num_requests == 24


@pytest.mark.parametrize("name", SERVERS)
def test_a_command_names_the_weights_of_its_row(name: str) -> None:
    """And no path of this machine in the form that is published."""
    files = ModelFiles(Path("/at/m/hf"), Path("/at/m/whole.gguf"), Path("/at/m/q4.gguf"))
    entry = SERVERS[name]

    started = launch(entry, files, Path("/at/peers"), port=1, threads=2)

    model = files.q4_file if entry.weights == "q4" else files.checkpoint
    if entry.weights == "bf16" and entry.kind is Kind.LLAMA:
        model = files.bf16_file
    assert str(model) in started.command
    shown = started.shown({"/at/m": "MODELS", "/at/peers": "PEERS"})
    assert "MODELS/" in shown
    assert "/at/" not in shown


def test_ratios_are_of_one_round() -> None:
    """Rounds that only one side has are left out; above 1 ours is ahead."""
    ours = {0: sample(300, 0.1), 1: sample(100, 0.2), 2: sample(1)}
    theirs = {0: sample(100, 0.4), 1: sample(50, 0.4)}

    assert paired(ours, theirs, TOKENS) == pytest.approx([3.0, 2.0])
    assert paired(ours, theirs, TTFT) == pytest.approx([4.0, 2.0])


def test_tables_say_what_is_missing_and_which_goals_are_missed() -> None:
    """A server without samples has its reason; goals are judged by the median."""
    entries = list(SERVERS.values())
    samples = {
        ("ramify-bf16", "prefixes"): {
            0: sample(300, offline_s=0.25, bound_s=0.25),
            1: sample(310, offline_s=0.3, bound_s=0.25),
        },
        ("vllm-bf16", "prefixes"): {0: sample(100, own_tokens=99), 1: sample(120)},
        ("ramify-q4", "prefixes"): {0: sample(300)},
        ("llama-q4", "prefixes"): {0: sample(100)},
    }

    rows = table(CELLS["prefixes"], entries, samples, {"llama-bf16": "was not built"}).split("\n")
    goals = goal_table(entries, samples)

    assert rows[4].startswith("| **Ramify**, bf16 | 305.0 (300.0–310.0; 2) |  | 100.0 |")
    assert rows[4].endswith("| 50.0% | 1.20 (1.08–1.33) |")
    assert rows[5].startswith("| vLLM, bf16 | 110.0 (100.0–120.0; 2) | 2.79 (2.58–3.00) |")
    assert rows[6].startswith("| llama.cpp, bf16 | was not built |")
    assert len({row.count("|") for row in rows[2:]}) == 1
    assert "| vLLM, bf16 | 2.79 (2.58–3.00) | 2.4 | 3.0 | 3.67 | met |" in goals
    assert "| llama.cpp, Q4_1 | 3.00 (3.00–3.00) | 5.5 | 8.0 |  | missed |" in goals
    assert (
        "| time over the engine alone | **Ramify**, bf16 | 1.20 (1.08–1.33) | ≤ 1.25 | | | met |"
        in goals
    )
    assert any(
        "vllm-bf16, prefixes, round 0: the server counts 99" in line for line in checks(samples)
    )


def test_a_document_ends_within_an_exhibit_of_its_size() -> None:
    """Two seeds differ from the first line on."""
    texts = [document(random.Random(seed), 300, lambda text: len(text.split())) for seed in (1, 2)]

    assert texts[0].split("\n")[0] != texts[1].split("\n")[0]
    assert all(300 <= len(text.split()) < 335 for text in texts)
