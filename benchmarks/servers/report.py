"""Samples of all rounds as the tables of docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engines.stats import Spread, paired_ratios

from servers.cells import Cell
from servers.contract import Kind, Sample, ServerEntry

Samples = Mapping[int, Sample]  # round → sample
HEAD = (
    "| server | tokens/s: median (min–max; n) | Ramify / this | TTFT ms: median | 99 % "
    "| mean, client / server | time per token ms, client / server | hit rate | over the engine alone |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)


@dataclass(frozen=True, slots=True)
class Goal:
    """What a peer's figure over ours, or ours over theirs, should be; above 1 Ramify is ahead."""

    cell: str
    figure: str
    peer: Kind
    least: float
    stretch: float


METHOD = """\
All servers are up and take turns, one at a time, in reversed order from round to round; clients and servers share
the cores. Every round has new prompts, the same for each server, so caches are cold at its beginning. Prefix caching
is on everywhere; each server has {kv_gib} GiB for K/V and {threads} threads. Answers are greedy and equally long
(temperature 0, `ignore_eos`). After its start, and off the clock, each server answers 16 requests and 4 chats.
bf16 is the published Q4_1 file, widened.
{no_q4}
Completions are sent by `vllm bench serve`; it has no dataset with
several turns, so chats are sent by OpenAI's SDK.

*Ramify / this* compares servers with the same weights in the same round; above 1 Ramify is faster. The *server's*
means are the growth of its own metrics; llama.cpp's have no time to first token. *Hit rate* is the share of prompt
tokens that were not computed, by the server's metrics; prefixes that requests in flight share count as hits.
*Over the engine alone* is the time behind the server over the time of Ramify's engine without it, for the same
requests in the same round. *At most here* is the ratio if Ramify took no longer than the arithmetic and the bytes of
the requests take on this machine, every shared prefix computed once: {peak:,.0f} GFLOP/s of bfloat16 matmuls and
{bandwidth:.1f} GB/s of reads, measured before the servers start.
"""
TOKENS, TTFT = "tokens/s", "TTFT, median"
GOALS = (
    Goal("prefixes", TOKENS, Kind.VLLM, 2.4, 3.0),
    Goal("prefixes", TOKENS, Kind.LLAMA, 5.5, 8.0),
    Goal("rate", TTFT, Kind.VLLM, 2.4, 3.0),
    Goal("rate", TTFT, Kind.LLAMA, 5.5, 8.0),
    Goal("questions", TOKENS, Kind.VLLM, 2.4, 3.0),
    Goal("questions", TOKENS, Kind.LLAMA, 5.5, 8.0),
)
GOAL_HEAD = (
    "| cell | figure | of | ratio: median (min–max) | goal | stretch | at most here | |\n"
    "|---|---|---|---:|---:|---:|---:|---|"
)
OFFLINE_LIMIT = 1.25  # time behind the server over time of the engine alone


def paired(ours: Samples, theirs: Samples, figure: str) -> list[float]:
    """How far ours is ahead in a figure, by the rounds that both have."""
    rounds = sorted(set(ours) & set(theirs))

    def times(samples: Samples) -> list[float]:
        figures = [samples[number].client for number in rounds]
        if figure == TTFT:
            return [client.ttft_median_s for client in figures]
        return [1.0 / client.tokens_per_s for client in figures]

    return paired_ratios(times(theirs), times(ours))


def most_possible(ours: Samples, theirs: Samples) -> float | None:
    """The median ratio of a peer's time and the roofline of the same requests; None: it has none."""
    ratios = [
        theirs[number].client.duration_s / sample.bound_s
        for number, sample in ours.items()
        if sample.bound_s is not None and number in theirs
    ]
    return Spread.of(ratios).mid if ratios else None


def offline_ratios(samples: Samples) -> list[float]:
    """Time behind the server over time of the engine alone, by round."""
    return [
        sample.client.duration_s / sample.offline.total_s
        for sample in samples.values()
        if sample.offline is not None
    ]


def table(
    cell: Cell,
    entries: Sequence[ServerEntry],
    samples: Mapping[tuple[str, str], Samples],
    missing: Mapping[str, str],
) -> str:
    """A cell: every server, those of the same weights beside Ramify's.

    Args:
        missing: server → why it has no sample.
    """
    lines = [f"#### {cell.name}: {cell.title}", "", HEAD]
    for entry in entries:
        rows = samples.get((entry.name, cell.name), {})
        if not rows:
            reason = missing.get(entry.name, "not run")
            lines.append(f"| {entry.title} | {reason} |" + " |" * 7)
            continue
        ours = samples.get((ours_of(entry, entries), cell.name), {})
        lines.append(_row(entry, rows, ours))
    return "\n".join(lines)


def ours_of(entry: ServerEntry, entries: Sequence[ServerEntry]) -> str:
    """The name of our server with the same weights; "" if it is not among them, or is this."""
    names = [
        other.name
        for other in entries
        if other.kind is Kind.RAMIFY and other.weights == entry.weights and other is not entry
    ]
    return names[0] if names and entry.kind is not Kind.RAMIFY else ""


def _row(entry: ServerEntry, rows: Samples, ours: Samples) -> str:
    def mid(value_of: Callable[[Sample], float | None]) -> float | None:
        values = [value for value in map(value_of, rows.values()) if value is not None]
        return Spread.of(values).mid if values else None

    def both(value_of: Callable[[Sample], float], own_of: Callable[[Sample], float | None]) -> str:
        return f"{_ms(mid(value_of))} / {_ms(mid(own_of))}"

    speed = Spread.of([sample.client.tokens_per_s for sample in rows.values()])
    cells = [
        entry.title,
        f"{speed.mid:,.1f} ({speed.low:,.1f}–{speed.high:,.1f}; {speed.count})",
        _spread(paired(ours, rows, TOKENS)),
        _ms(mid(lambda sample: sample.client.ttft_median_s)),
        _ms(mid(lambda sample: sample.client.ttft_p99_s)),
        both(lambda sample: sample.client.ttft_mean_s, lambda sample: sample.own.ttft_mean_s),
        both(lambda sample: sample.client.token_mean_s, lambda sample: sample.own.token_mean_s),
        _share(mid(lambda sample: sample.own.hit_rate)),
        _spread(offline_ratios(rows)),
    ]
    return f"| {' | '.join(cells)} |"


def goal_table(entries: Sequence[ServerEntry], samples: Mapping[tuple[str, str], Samples]) -> str:
    """Every goal of which both sides were measured, and how far it is met; "" if there is none."""
    lines = []
    for goal in GOALS:
        for entry in entries:
            if entry.kind is not goal.peer:
                continue
            ours = samples.get((ours_of(entry, entries), goal.cell), {})
            ratios = paired(ours, samples.get((entry.name, goal.cell), {}), goal.figure)
            if ratios:
                middle = Spread.of(ratios).mid
                verdict = "missed" if middle < goal.least else "met"
                verdict = "stretch met" if middle >= goal.stretch else verdict
                rows = samples[entry.name, goal.cell]
                most = most_possible(ours, rows) if goal.figure == TOKENS else None
                lines.append(
                    f"| {goal.cell} | {goal.figure} | {entry.title} | {_spread(ratios)} "
                    f"| {goal.least} | {goal.stretch} | {'' if most is None else f'{most:.2f}'} "
                    f"| {verdict} |"
                )
    for entry in entries:
        for (name, cell), rows in samples.items():
            ratios = offline_ratios(rows) if name == entry.name else []
            if ratios:
                verdict = "met" if Spread.of(ratios).mid <= OFFLINE_LIMIT else "missed"
                lines.append(
                    f"| {cell} | time over the engine alone | {entry.title} | {_spread(ratios)} "
                    f"| ≤ {OFFLINE_LIMIT} | | | {verdict} |"
                )
    return "\n".join([GOAL_HEAD, *lines]) if lines else ""


def checks(samples: Mapping[tuple[str, str], Samples]) -> list[str]:
    """What a reader must know of how sound the figures are."""
    lines = []
    busiest = max(
        (sample.idle_cpu_s / sample.client.duration_s, name, cell)
        for (name, cell), rows in samples.items()
        for sample in rows.values()
    )
    lines.append(
        f"Servers that wait took at most {busiest[0]:.1%} of a core ({busiest[2]}, beside {busiest[1]})."
    )
    for (name, cell), rows in samples.items():
        for number, sample in rows.items():
            if round(sample.own.output_tokens) != sample.client.output_tokens:
                lines.append(
                    f"{name}, {cell}, round {number}: the server counts "
                    f"{sample.own.output_tokens:,.0f} tokens, the client "
                    f"{sample.client.output_tokens:,}."
                )
    return lines


def as_json(samples: Mapping[tuple[str, str], Samples]) -> list[dict[str, Any]]:
    """Every sample."""
    return [
        {"server": name, "cell": cell, "round": number, **asdict(sample)}
        for (name, cell), rows in samples.items()
        for number, sample in rows.items()
    ]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = Spread.of(values)
    return f"{spread.mid:.2f} ({spread.low:.2f}–{spread.high:.2f})"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value * 1e3:,.1f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
