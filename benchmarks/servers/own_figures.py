"""What a server's own metrics say of a cell: the difference of two scrapes of /metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping

from servers.contract import Kind, OwnFigures

Metrics = Mapping[str, float]  # name with its labels, as the server writes it → value
LINE = re.compile(r"^([A-Za-z_:][^\s{]*(?:\{.*\})?)\s+(\S+)", re.MULTILINE)


def parse_metrics(text: str) -> dict[str, float]:
    """The samples of Prometheus's text format."""
    return {match[1]: float(match[2]) for match in LINE.finditer(text)}


def own_figures(kind: Kind, before: Metrics, after: Metrics) -> OwnFigures:
    """A server's own figures of what it did between two scrapes."""

    def grown(name: str, label: str = "") -> float:
        return total(after, name, label) - total(before, name, label)

    def mean(name: str) -> float | None:
        return ratio(grown(f"{name}_sum"), grown(f"{name}_count"))

    if kind is Kind.LLAMA:
        computed = grown("llamacpp:prompt_tokens_total")
        cached = grown("llamacpp:prompt_tokens_cached_total")
        tokens = grown("llamacpp:tokens_predicted_total")
        return OwnFigures(
            ttft_mean_s=None,
            token_mean_s=ratio(grown("llamacpp:tokens_predicted_seconds_total"), tokens),
            output_tokens=tokens,
            hit_rate=ratio(cached, cached + computed),
        )
    if kind is Kind.VLLM:
        hit_rate = ratio(
            grown("vllm:prefix_cache_hits_total"), grown("vllm:prefix_cache_queries_total")
        )
    else:
        # Prefixes that a request shared with another in flight were computed once: they count as hits.
        sources = "ramify_prompt_tokens_by_source_total"
        share = ratio(grown(sources, 'source="computed"'), grown(sources))
        hit_rate = None if share is None else 1 - share
    return OwnFigures(
        ttft_mean_s=mean(f"{PREFIXES[kind]}time_to_first_token_seconds"),
        token_mean_s=mean(f"{PREFIXES[kind]}inter_token_latency_seconds"),
        output_tokens=grown(f"{PREFIXES[kind]}generation_tokens_total"),
        hit_rate=hit_rate,
    )


PREFIXES = {Kind.RAMIFY: "ramify_", Kind.VLLM: "vllm:"}


def total(metrics: Metrics, name: str, label: str = "") -> float:
    """The sum over all label sets of a metric that contain `label`; 0 if there is none."""
    return sum(
        value
        for key, value in metrics.items()
        if key.partition("{")[0] == name and label in key.partition("{")[2]
    )


def ratio(part: float, whole: float) -> float | None:
    """None if there is no whole."""
    return part / whole if whole else None
