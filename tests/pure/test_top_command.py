"""`ramify top` beside a server on a real socket."""

from __future__ import annotations

import importlib
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ramify.cli import app
from ramify.cli.top import Snapshot, Watched, lines_of, samples_of
from ramify.server.tenants import ApiKeys, Caller, hash_key
from tests.pure.live_server import Live, live, until

# The package has the function of this name.
command = importlib.import_module("ramify.cli.top")
LONG = "Mara has 14 lamps in the attic of the old house.\n\x1b[2JShe lights each of them. " * 3


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["top", *map(str, arguments)])


def line(text: str, name: str) -> str:
    [shown] = re.findall(rf"^{name} .*$", text, re.MULTILINE)
    return str(shown)


def test_what_runs_and_waits_is_shown() -> None:
    """While one of three long answers is generated, and the others wait for its row."""
    with live(max_num_seqs=1) as served:

        def ask(number: int) -> None:
            served.ask(f"{number}: {LONG}", max_tokens=700, ignore_eos=True)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: counts(served) == (1, 2))
        shown = run(served.url, "--once")
        for thread in threads:
            thread.join()

    assert shown.exit_code == 0, shown.output
    assert "1 running of 1, 2 waiting (" in line(shown.output, "requests")


def counts(served: Live) -> tuple[int, int]:
    aggregate = served.get("/v1/loads").json()["aggregate"]
    return aggregate["total_running_reqs"], aggregate["total_waiting_reqs"]


def test_the_cache_and_its_tree_are_shown() -> None:
    """Hit rate, pages, sessions, and the nodes with most hits; text of prompts moves no cursor."""
    with live() as served:
        for _ in range(3):
            assert served.ask(LONG, session_id="a").status_code == 200
        served.until_idle()
        cache = served.get("/v1/cache").json()
        shown = run(served.url + "/v1", "--once", "--nodes", "5")

    assert shown.exit_code == 0, shown.output
    assert f"{cache['recent_hit_rate']:.1%} lately" in line(shown.output, "hit rate")
    assert f"{cache['num_pages']:,} pages of 4 tokens" in line(shown.output, "pool")
    assert "1 alive, 0 ended" in line(shown.output, "sessions")
    assert "14 lamps" in shown.output
    assert "\x1b" not in shown.output
    first = shown.output.split("top of the tree\n")[1].split("\n")[0]
    assert first.split()[0] == "2"


def test_a_pipe_gets_it_once() -> None:
    """Without a terminal nothing is repeated; an empty cache says so."""
    with live() as served:
        shown = run(served.url)

    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith(served.url)
    assert "nothing is cached" in shown.output


def test_errors_are_a_line() -> None:
    """No server, no key, no Ramify server: one line with what to do, and exit code 2."""
    keys = ApiKeys({hash_key("k"): Caller("ann"), hash_key("admin"): Caller("", is_admin=True)})
    with live(keys) as served:
        refused = run(served.url, "--once")
        allowed = run(served.url, "--once", "--api-key", "admin")
        url = served.url
    gone, wrong = run(url, "--once"), run("localhost:8000")

    assert allowed.exit_code == 0, allowed.output
    for result, message in (
        (refused, "--api-key"),
        (gone, "does not answer"),
        (wrong, "must begin with http"),
    ):
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_rates_tiers_and_engines() -> None:
    """Two snapshots give tokens a second; each tier and each of several engines has a line."""
    cache: dict[str, Any] = dict.fromkeys(
        "num_pages free_pages evictable_pages pinned_pages page_size evicted_pages".split(), 8
    )
    cache |= dict.fromkeys("recent_hit_rate hit_rate ideal_hit_rate".split(), 0.5)
    cache |= {"num_sessions": 1, "ended_sessions": 0, "evictions": {"session_ended": 0}}
    load = dict.fromkeys(
        "num_running_reqs num_waiting_reqs num_waiting_uncached_tokens max_running_requests".split(),
        2,
    )
    loads = [load | {"worker": name, "token_usage": 0.25, "cache_hit_rate": 0.5} for name in "ab"]
    page = "\n".join(
        f'ramify_tier_{name}{{replica="{replica}",tier="disk"}} {value}'
        for replica in "ab"
        for name, value in (
            ("pages", 3),
            ("used_bytes", 2**29),
            ("budget_bytes", 2**30),
            ("loaded_pages_total", 1),
            ("failed_reads_total", 0),
        )
    )
    samples = [
        dict(samples_of(f"# HELP x y\nramify_computed_tokens_total {count}\n{page}\n"))
        for count in (100.0, 350.0)
    ]
    before, now = (
        Snapshot("http://x", at, "12:00:00", {"version": "1", "loads": loads}, cache, (), sample)
        for at, sample in zip((1.0, 3.0), samples, strict=True)
    )

    text = "\n".join(lines_of(now, before))

    assert "350 computed, 125/s" in line(text, "tokens")
    assert "6 pages, 1.00 of 2.00 GiB; 2 loaded, 0 failed reads" in line(text, "disk")
    assert "2 running, 2 waiting, pool 25% held, hit rate 50.0%" in line(text, "engine b")
    assert "4 running of 4" in line(text, "requests")


def test_a_terminal_is_refreshed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until Ctrl-C; a server that has gone is said, above what it last said."""
    with live() as served:
        watched = Watched(served.url, key=None, num_nodes=5)
        snapshot = watched.look()
        looks: list[float] = []

        def wait(seconds: float) -> None:
            looks.append(seconds)
            if len(looks) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(command.time, "sleep", wait)
        command._watch(watched, snapshot, 0.5)

    assert looks == [0.5] * 3


def test_no_torch_is_loaded() -> None:
    """The command needs no engine: a laptop may watch a server."""
    source = Path(str(command.__file__)).read_text(encoding="utf-8")

    assert "ramify.engine" not in source
