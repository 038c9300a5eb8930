"""`ramify top`: what a server runs, what waits, and what its cache holds, in the terminal."""

from __future__ import annotations

import http.client
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ramify.cli.options import exit_on_error
from ramify.counts import counted
from ramify.errors import ConfigError, RamifyError
from ramify.reasons import reason_of

TIMEOUT_S = 10.0
BAR_CHARS = 24
MAX_TEXT = 60  # characters of a node's text
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
GIB = 1 << 30


class UnreachableError(RamifyError):
    """The server does not answer, or refuses."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a server says of itself at one moment."""

    url: str
    taken_s: float  # of `time.monotonic`
    clock: str
    loads: Mapping[str, Any]  # `/v1/loads`
    cache: Mapping[str, Any]  # `/v1/cache`
    nodes: tuple[Mapping[str, Any], ...]  # of `/v1/cache/tree`
    samples: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]  # of `/metrics`

    def total(self, name: str) -> float:
        """The sum of a metric over its labels; 0 if there is none."""
        return sum(value for (metric, _), value in self.samples.items() if metric == name)

    def by_tier(self, name: str) -> dict[str, float]:
        """A metric of the tiers, summed over replicas."""
        sums: dict[str, float] = {}
        for (metric, labels), value in self.samples.items():
            tier = dict(labels).get("tier")
            if metric == name and tier is not None:
                sums[tier] = sums.get(tier, 0.0) + value
        return sums


class Watched:
    """A server that is looked at.

    Args:
        url: with or without `/v1`.
        key: the operator's key; None: the server takes this machine's requests without.
        num_nodes: of the tree.

    Raises:
        ConfigError: the URL is of no HTTP server.
    """

    def __init__(self, url: str, *, key: str | None, num_nodes: int) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the URL {url} must begin with http:// or https://")
        self.url, self._num_nodes = url.rstrip("/").removesuffix("/v1"), num_nodes
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def look(self) -> Snapshot:
        """A snapshot.

        Raises:
            UnreachableError: the server does not answer, or not to this key.
        """
        loads, cache = self._json("/v1/loads"), self._json("/v1/cache")
        tree = self._json(f"/v1/cache/tree?max_nodes={self._num_nodes}")
        return Snapshot(
            self.url,
            time.monotonic(),
            time.strftime("%H:%M:%S"),
            loads,
            cache,
            tuple(tree["nodes"]),
            dict(samples_of(self._read("/metrics").decode())),
        )

    def _json(self, path: str) -> dict[str, Any]:
        try:
            value = json.loads(self._read(path))
        except ValueError as error:
            raise UnreachableError(
                f"{self.url}{path} cannot be read: {reason_of(error)}"
            ) from error
        if not isinstance(value, dict):
            raise UnreachableError(f"{self.url}{path} is no JSON object; is this a Ramify server?")
        return value

    def _read(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, headers=self._headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310 - http
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            hint = "; give the operator's key with --api-key" if error.code in (401, 403) else ""
            raise UnreachableError(f"{self.url}{path} answers {error.code}{hint}") from error
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"{self.url} does not answer: {reason_of(error)}") from error


def samples_of(text: str) -> Iterator[tuple[tuple[str, tuple[tuple[str, str], ...]], float]]:
    """The samples of a page of metrics: ((name, labels), value)."""
    for name, labels, value in SAMPLE.findall(text):
        yield (name, tuple(LABEL.findall(labels))), float(value)


def lines_of(now: Snapshot, before: Snapshot | None = None) -> list[str]:
    """A snapshot as text; with the one before, rates as well."""
    return [
        f"{now.url}  ramify {now.loads['version']}  {now.clock}",
        "",
        *_request_lines(now, before),
        *_cache_lines(now),
        *_tier_lines(now),
        *_engine_lines(now),
        "",
        *_tree_lines(now),
    ]


def _request_lines(now: Snapshot, before: Snapshot | None) -> list[str]:
    loads = now.loads["loads"]
    running, waiting = _sum(loads, "num_running_reqs"), _sum(loads, "num_waiting_reqs")
    line = (
        f"requests   {running:,} running of {_sum(loads, 'max_running_requests'):,}, "
        f"{waiting:,} waiting ({_sum(loads, 'num_waiting_uncached_tokens'):,} tokens to compute)"
    )
    computed = now.total("ramify_computed_tokens_total")
    tokens = f"tokens     {computed:,.0f} computed"
    if before is not None and now.taken_s > before.taken_s:
        gained = computed - before.total("ramify_computed_tokens_total")
        tokens += f", {max(0.0, gained) / (now.taken_s - before.taken_s):,.0f}/s"
    return [line, tokens]


def _cache_lines(now: Snapshot) -> list[str]:
    cache = now.cache
    pages = cache["num_pages"]
    held = pages - cache["free_pages"] - cache["evictable_pages"]
    return [
        (
            f"hit rate   {cache['recent_hit_rate']:.1%} lately, {cache['hit_rate']:.1%} since the "
            f"start, {cache['ideal_hit_rate']:.1%} without a limit"
        ),
        (
            f"pool       {_bar(held, cache['evictable_pages'], pages)}  {pages:,} pages of "
            f"{cache['page_size']} tokens: {held:,} held, {cache['evictable_pages']:,} cached, "
            f"{cache['free_pages']:,} free; {cache['pinned_pages']:,} pinned"
        ),
        (
            f"sessions   {cache['num_sessions']:,} alive, {cache['ended_sessions']:,} ended; "
            f"{cache['evicted_pages']:,} pages evicted, "
            f"{cache['evictions']['session_ended']:,} of these first"
        ),
    ]


def _tier_lines(now: Snapshot) -> list[str]:
    """A line for each tier below the pool."""
    used, budget = now.by_tier("ramify_tier_used_bytes"), now.by_tier("ramify_tier_budget_bytes")
    loaded = now.by_tier("ramify_tier_loaded_pages_total")
    failed = now.by_tier("ramify_tier_failed_reads_total")
    return [
        f"{tier:<10} {_bar(used[tier], 0, budget[tier])}  {counted(round(pages), 'page')}, "
        f"{used[tier] / GIB:.2f} of {budget[tier] / GIB:.2f} GiB; {loaded[tier]:,.0f} loaded, "
        f"{counted(round(failed[tier]), 'failed read')}"
        for tier, pages in now.by_tier("ramify_tier_pages").items()
    ]


def _engine_lines(now: Snapshot) -> list[str]:
    """A line for each engine; none with one."""
    loads = now.loads["loads"]
    if len(loads) < 2:
        return []
    return [
        f"engine {load['worker']:<3} {load['num_running_reqs']:,} running, "
        f"{load['num_waiting_reqs']:,} waiting, pool {load['token_usage']:.0%} held, "
        f"hit rate {load['cache_hit_rate']:.1%}"
        for load in loads
    ]


def _tree_lines(now: Snapshot) -> list[str]:
    """The nodes with most hits, indented below their parents."""
    lines = [f"{'hits':>8} {'tokens':>8} {'held by':>8} {'idle':>8}  top of the tree"]
    for node in now.nodes:
        text = (
            _printable(str(node["text"]))
            or f"{counted(len(node['token_ids']), 'token')} without a text"
        )
        tenant = f"  [{_printable(node['tenant'])}]" if node["tenant"] else ""
        lines.append(
            f"{node['hits']:>8,} {node['num_tokens']:>8,} {node['pins']:>8,} "
            f"{node['idle_s']:>7.1f}s  {'  ' * node['level']}{text}{tenant}"
        )
    if len(lines) == 1:
        lines.append(f"{'':>36}nothing is cached")
    return lines


def _bar(full: float, half: float, total: float) -> str:
    """Shares of a total: `#` for the first, `+` for the second, `.` for the rest."""
    if total <= 0:
        return "[" + "." * BAR_CHARS + "]"
    num_full = min(BAR_CHARS, round(full / total * BAR_CHARS))
    num_half = min(BAR_CHARS - num_full, round(half / total * BAR_CHARS))
    return f"[{'#' * num_full + '+' * num_half:.<{BAR_CHARS}}]"


def _sum(loads: list[dict[str, Any]], name: str) -> int:
    return sum(int(load[name]) for load in loads)


def _printable(text: str) -> str:
    """A prompt's text in one line: what would move the cursor is a space."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 1] + "…"


def top(
    url: Annotated[str, typer.Argument(help="URL of a server.")] = "http://127.0.0.1:8000",
    once: Annotated[
        bool, typer.Option("--once", help="Print it once, as where the output is no terminal.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")
    ] = 1.0,
    nodes: Annotated[int, typer.Option(min=1, max=1000, help="Nodes of the tree.")] = 20,
    api_key: Annotated[
        str | None, typer.Option(envvar="RAMIFY_ADMIN_KEY", help="The operator's key.")
    ] = None,
) -> None:
    """Watch a server: what runs and waits, hit rate, pool and tiers, top of the tree. Ctrl-C ends."""
    with exit_on_error():
        server = Watched(url, key=api_key, num_nodes=nodes)
        snapshot = server.look()
        if once or not sys.stdout.isatty():
            typer.echo("\n".join(lines_of(snapshot)))
            return
        _watch(server, snapshot, interval)


def _watch(server: Watched, snapshot: Snapshot, interval_s: float) -> None:
    """Show a snapshot every `interval_s`, until Ctrl-C."""
    from rich.live import Live
    from rich.text import Text

    before, lines = snapshot, lines_of(snapshot)
    with Live(Text("\n".join(lines)), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                try:
                    snapshot = server.look()
                    lines = lines_of(snapshot, before)
                    before, shown = snapshot, lines
                except UnreachableError as error:
                    shown = [str(error), "", *lines]
                text = Text("\n".join(shown), no_wrap=True, overflow="crop")
                live.update(text, refresh=True)
        except KeyboardInterrupt:
            return
