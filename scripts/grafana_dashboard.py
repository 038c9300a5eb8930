"""Write deploy/grafana-dashboard.json: the panels below, for one server or a cluster.

    PYTHONPATH=src python scripts/grafana_dashboard.py

Import the file in Grafana 10 or later and choose a Prometheus data source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[1] / "deploy" / "grafana-dashboard.json"
WIDTH, HEIGHT = 8, 8  # of a panel; a row is 24 wide
WINDOW = "[$__rate_interval]"
HERE = 'instance=~"$instance"'


class Panel(NamedTuple):
    """A chart of time series."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]  # expression, legend
    text: str = ""


def rate(metric: str, by: str = "", labels: str = "") -> str:
    """The rate of a counter, summed over everything but the label `by`."""
    selected = f"{HERE},{labels}" if labels else HERE
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({metric}{{{selected}}}{WINDOW}))"


def total(metric: str, by: str = "") -> str:
    """A gauge, summed over everything but the label `by`."""
    return f"{f'sum by ({by})' if by else 'sum'} ({metric}{{{HERE}}})"


def quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    """Median, 95th and 99th percentile of a histogram."""
    buckets = rate(f"{histogram}_bucket", "le")
    return tuple(
        (f"histogram_quantile({share}, {buckets})", f"p{100 * share:.0f}")
        for share in (0.5, 0.95, 0.99)
    )


HITS, LOOKED_UP = rate("ramify_cache_hit_tokens_total"), rate("ramify_cache_lookup_tokens_total")
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Cache",
        (
            Panel(
                "Hit rate",
                "percentunit",
                (
                    (f"{HITS} / {LOOKED_UP}", "hit"),
                    (f"avg (ramify_cache_ideal_hit_rate{{{HERE}}})", "without limit"),
                ),
                "Share of prompt tokens that hit, beside a cache that never evicts.",
            ),
            Panel(
                "Prompt tokens by source",
                "short",
                ((rate("ramify_prompt_tokens_by_source_total", "source"), "{{source}}"),),
                "Tokens a second: read from the cache, shared with a running request, computed.",
            ),
            Panel(
                "Misses by reason",
                "short",
                ((rate("ramify_cache_misses_total", "reason"), "{{reason}}"),),
                "Prompts a second, by why the first token that missed did.",
            ),
            Panel(
                "Pages",
                "short",
                (
                    (total("ramify_kv_pages"), "pool"),
                    (total("ramify_kv_pages_cached"), "cached"),
                    (total("ramify_kv_pages_pinned"), "pinned"),
                    (total("ramify_kv_pages_free"), "free"),
                ),
            ),
            Panel(
                "Evictions and preemptions",
                "short",
                (
                    (rate("ramify_cache_evicted_pages_total"), "pages evicted"),
                    (rate("ramify_cache_session_pages_total"), "of ended sessions"),
                    (rate("ramify_preemptions_total"), "preemptions"),
                ),
            ),
            Panel(
                "Tiers: pages loaded, written, evicted",
                "short",
                (
                    (rate("ramify_tier_loaded_pages_total", "tier"), "loaded from {{tier}}"),
                    (rate("ramify_tier_written_pages_total", "tier"), "written to {{tier}}"),
                    (rate("ramify_tier_evicted_pages_total", "tier"), "evicted from {{tier}}"),
                ),
            ),
        ),
    ),
    (
        "Latency",
        (
            Panel("Time to first token", "s", quantiles("ramify_time_to_first_token_seconds")),
            Panel("Between tokens", "s", quantiles("ramify_inter_token_latency_seconds")),
            Panel("In the queue", "s", quantiles("ramify_request_queue_time_seconds")),
        ),
    ),
    (
        "Load",
        (
            Panel(
                "Requests",
                "short",
                (
                    (total("ramify_requests_running"), "running"),
                    (total("ramify_requests_waiting"), "waiting"),
                ),
            ),
            Panel(
                "Tokens a second",
                "short",
                (
                    (rate("ramify_prompt_tokens_total"), "prompts"),
                    (rate("ramify_generation_tokens_total"), "generated"),
                    (rate("ramify_computed_tokens_total"), "computed"),
                ),
            ),
            Panel(
                "Responses by status",
                "reqps",
                ((rate("ramify_http_responses_total", "status"), "{{status}}"),),
            ),
        ),
    ),
    (
        "Health: each of these should be zero",
        (
            Panel(
                "Engine",
                "short",
                (
                    (rate("ramify_failed_steps_total"), "failed steps"),
                    (rate("ramify_stuck_steps_total"), "stuck steps"),
                    (rate("ramify_request_errors_total"), "request errors"),
                ),
            ),
            Panel(
                "Cache",
                "short",
                (
                    (rate("ramify_hit_mismatches_total"), "hits that changed an answer"),
                    (rate("ramify_audit_mismatches_total"), "wrong recounts"),
                    (rate("ramify_suspect_pages_total"), "suspect pages"),
                    (rate("ramify_tier_failed_reads_total", "tier"), "failed reads of {{tier}}"),
                ),
            ),
            Panel("Event loop delay", "s", quantiles("ramify_event_loop_delay_seconds")),
        ),
    ),
    (
        "Cluster: several engines behind this server",
        (
            Panel(
                "Work before a further request",
                "s",
                ((total("ramify_replica_queue_seconds", "replica"), "{{replica}}"),),
            ),
            Panel(
                "Decisions by reason",
                "reqps",
                (
                    (rate("ramify_routing_decisions_total", "reason"), "{{reason}}"),
                    (rate("ramify_routing_resumptions_total"), "answers continued elsewhere"),
                ),
            ),
            Panel(
                "Hits: predicted and real",
                "short",
                (
                    (rate("ramify_routing_predicted_tokens_total"), "predicted"),
                    (rate("ramify_routing_cached_tokens_total"), "real"),
                    (rate("ramify_routing_wrong_tokens_total"), "wrong"),
                ),
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {
                "type": "row", "title": title, "collapsed": False, "id": len(panels) + 1,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": [],
            }
        )  # fmt: skip
        y += 1
        for number, panel in enumerate(row):
            place = {"x": number % 3 * WIDTH, "y": y + number // 3 * HEIGHT}
            panels.append(_chart(panel, len(panels) + 1, place))
        y += -(-len(row) // 3) * HEIGHT
    return {
        "title": "Ramify",
        "uid": "ramify",
        "tags": ["ramify"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), _instances()]},
        "panels": panels,
    }


def _chart(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
        for index, (expression, legend) in enumerate(panel.series)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "id": number,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {**place, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": targets,
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _instances() -> dict[str, Any]:
    return {
        "name": "instance",
        "label": "Server",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": "label_values(ramify_steps_total, instance)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def text() -> str:
    """The dashboard as the file has it."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
