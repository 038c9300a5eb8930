"""The endpoints behind the live page: its files, the branches of the tree, and the activity."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

from ramify.server.activity import BUCKET_S, NUM_BUCKETS, Activity
from ramify.server.generation import CacheUsage
from ramify.server.ollama.endpoints import RUNNING
from ramify.server.page.assets import FILES, page_assets
from ramify.server.tenants import ApiKeys, Caller, Quota, hash_key
from tests.pure.server_bench import ServerBench, chat, run

KEYS = ApiKeys(
    {
        hash_key("a"): Caller("ann"),
        hash_key("b"): Caller("bob"),
        hash_key("o"): Caller("operator", is_admin=True),
    }
)
BROWSER = {"accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}


async def texts(bench: ServerBench, key: str | None) -> str:
    """The text of all nodes that a key shows."""
    answer = await bench.call("GET", "/v1/cache/branches?max_nodes=1000&levels=64", key=key)
    return "".join(node["text"] for node in answer.json["nodes"])


def test_the_root_is_the_page_for_a_browser_and_a_text_for_a_client() -> None:
    """`GET /` answers clients that probe as Ollama does; `/ui` is the page for all, and `/ui/` leads there."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            probe = await bench.call("GET", "/")
            page = await bench.call("GET", "/", headers=BROWSER)
            ui = await bench.call("GET", "/ui")
            slash = await bench.call("GET", "/ui/")

        assert probe.body.decode() == RUNNING
        assert page.body == ui.body
        assert (slash.status, slash.headers["location"]) == (307, "../ui")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert probe.headers["vary"] == page.headers["vary"] == "Accept"

    run(main())


def test_files_have_types_tags_and_a_strict_policy() -> None:
    """Each file is served with its type, and as 304 to a browser that has it; nothing else is."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            for name, asset in page_assets().items():
                answer = await bench.call("GET", f"/ui/{name}")
                tag = {"if-none-match": f'"x", W/{answer.headers["etag"]}'}
                again = await bench.call("GET", f"/ui/{name}", headers=tag)

                assert (answer.status, answer.body) == (200, asset.body)
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert "script-src 'self';" in answer.headers["content-security-policy"]
                assert (again.status, again.body) == (304, b"")
            for name in ("none.js", "..%2Fassets.py", "../assets.py", "assets.py"):
                assert (await bench.call("GET", f"/ui/{name}")).status == 404

    run(main())


def test_the_page_needs_nothing_from_elsewhere() -> None:
    """No script in the HTML, no address of another site, and every file that it names is there."""
    html = (FILES / "index.html").read_text("utf-8")

    assert re.findall(r"<script(?![^>]*\bsrc=)", html) == []
    assert re.findall(r"\son\w+=|\sstyle=|javascript:", html) == []
    named = re.findall(r'(?:src|href)="(ui/[^"]+)"', html)
    for path in FILES.glob("*.js"):
        source = path.read_text("utf-8")
        named += [f"ui/{name}" for name in re.findall(r'from "\./([^"]+)"', source)]
        if "min" not in path.name:
            assert "innerHTML" not in source
            assert not re.search(r"\beval\(|https?://", source.replace("http://www.w3.org", ""))
    assert {name.removeprefix("ui/") for name in named} <= set(page_assets())
    assert sum(len(asset.body) for asset in page_assets().values()) < 200_000


def test_a_tenant_sees_the_branches_and_requests_of_its_own() -> None:
    """The filter is on the server; only the operator sees all."""

    async def main() -> dict[str, Any]:
        async with ServerBench(keys=KEYS).running() as bench:
            await bench.post("/v1/chat/completions", chat("Ann counts her lamps. " * 9), key="a")
            await bench.post("/v1/chat/completions", chat("Bob sells his boat. " * 9), key="b")
            shown = {key: await texts(bench, key) for key in ("a", "b", "o")}
            [bobs] = [
                node
                for node in (await bench.call("GET", "/v1/cache/branches", key="b")).json["nodes"]
                if not node["parent"]
            ]
            below = await bench.call("GET", f"/v1/cache/branches?below={bobs['id']}", key="a")
            history = {
                key: (await bench.call("GET", "/v1/activity", key=key)).json["history"]
                for key in ("a", "o")
            }
            refused = [
                (await bench.call("GET", path)).status
                for path in ("/v1/activity", "/v1/cache/branches")
            ]
        return {"shown": shown, "below": below, "history": history, "refused": refused}

    seen = run(main())

    assert "lamps" in seen["shown"]["a"] and "boat" not in seen["shown"]["a"]
    assert "boat" in seen["shown"]["b"] and "lamps" not in seen["shown"]["b"]
    assert "lamps" in seen["shown"]["o"] and "boat" in seen["shown"]["o"]
    assert seen["below"].status == 404
    assert sum(bucket["requests"] for bucket in seen["history"]["a"]["buckets"]) == 1
    assert sum(bucket["requests"] for bucket in seen["history"]["o"]["buckets"]) == 2
    assert "cache" not in seen["history"]["a"]
    assert seen["refused"] == [401, 401]


def test_a_tenant_without_quota_sees_its_branches() -> None:
    """They are no tokens and no answers: the page of a tenant whose tokens are used up goes on."""

    async def main() -> list[int]:
        keys = ApiKeys({hash_key("a"): Caller("ann", quota=Quota(tokens_per_minute=100))})
        async with ServerBench(keys=keys).running() as bench:
            body = chat("Ann counts her lamps. " * 9, max_tokens=60, ignore_eos=True)
            await bench.post("/v1/chat/completions", body, key="a")
            return [
                (await bench.post("/v1/chat/completions", body, key="a")).status,
                (await bench.call("GET", "/v1/cache/branches", key="a")).status,
                (await bench.call("GET", "/v1/activity", key="a")).status,
            ]

    assert run(main()) == [429, 200, 200]


def test_strangers_of_a_server_without_keys_see_nobody() -> None:
    """With `--insecure` all callers are one tenant; they see neither texts nor requests of others."""

    async def main() -> None:
        async with ServerBench(local_admin=False).running() as bench:
            for path in ("/v1/activity", "/v1/cache/branches"):
                assert (await bench.call("GET", path)).status == 403

    run(main())


def test_what_runs_is_listed_while_it_runs() -> None:
    """A live request is listed with its tokens, and gone when it has ended."""
    seen: list[Any] = []
    begun: list[bool] = []
    is_seen = threading.Event()

    def next_token(context: Sequence[int]) -> int:
        """Any token, the second one not before the first was seen."""
        begun.append(True)
        assert len(begun) == 1 or is_seen.wait(60)
        return 7

    async def main() -> Any:
        bench = ServerBench()
        live = bench.service.live
        bench.device.next_token = next_token

        def look(*_: object) -> None:
            seen.append(live.as_json(None, 9))
            is_seen.set()

        bench.service.event_listeners.append(look)
        async with bench.running():
            body = chat("Who lives in Rome? " * 9, max_tokens=9, ignore_eos=True)
            await bench.post("/v1/chat/completions", body)
            return (await bench.call("GET", "/v1/activity")).json

    after = run(main())

    [first], [request] = seen[0]["requests"], seen[-1]["requests"]
    assert (first["state"], request["state"]) == ("waiting", "running")
    assert request["read"] + request["shared"] + request["computed"] == request["prompt_tokens"]
    assert request["output_tokens"] == request["max_tokens"] == 9
    assert after["live"] == {"running": 0, "waiting": 0, "requests": []}
    assert after["is_admin"]
    assert sum(bucket["requests"] for bucket in after["history"]["buckets"]) == 1
    assert sum(bucket["output"] for bucket in after["history"]["buckets"]) == 9
    assert max(bucket["running"] for bucket in after["history"]["buckets"]) == 1


def test_what_a_tenant_has_live_is_counted_apart_from_all() -> None:
    """The charts of a tenant show its own requests, and a long answer in every bucket that somebody reads."""
    service = ServerBench().service
    lamp = service.live.arrive("ann", num_prompt=9, max_tokens=1)
    service.live.arrive("bob", num_prompt=9, max_tokens=1)
    for tenant in ("ann", None, "eve"):
        service.observe_live(tenant)

    def peaks(tenant: str | None) -> list[tuple[int, int]]:
        buckets = service.activity.as_json(tenant)["buckets"]
        return [(bucket["running"], bucket["waiting"]) for bucket in buckets]

    assert (peaks("ann"), peaks(None), peaks("eve")) == ([(0, 1)], [(0, 2)], [])
    service.live.withdraw(lamp)
    service.live.withdraw(lamp)
    assert service.live.as_json("ann", 9) == {"running": 0, "waiting": 0, "requests": []}
    assert service.live.as_json(None, 9)["waiting"] == 1


def test_branches_refuse_what_is_no_number() -> None:
    """Errors name the parameter and the limits."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            for query in ("max_nodes=0", "max_nodes=1001", "levels=x", "below=-1"):
                answer = await bench.call("GET", f"/v1/cache/branches?{query}")
                assert answer.status == 400
                assert answer.json["error"]["param"] == query.split("=")[0]

    run(main())


def test_activity_forgets_what_is_older_than_ten_minutes() -> None:
    """Buckets are sums of a few seconds; only the last `NUM_BUCKETS` are there."""
    now = [1000.0]
    activity = Activity(lambda: now[0])
    usage = CacheUsage(read=16, shared=4, computed=2, written=0, miss=None)

    activity.begun("ann", usage, 0.25)
    activity.begun("ann", usage, 0.75)
    activity.ended("ann", 9)
    first = activity.as_json("ann")["buckets"]
    now[0] += BUCKET_S * (NUM_BUCKETS - 1)
    activity.begun("bob", None, 1.0)
    both = activity.as_json(None)["buckets"]
    now[0] += BUCKET_S
    last = activity.as_json(None)["buckets"]

    assert first[0]["read"] == 32 and first[0]["output"] == 9
    assert (first[0]["ttft_s"], first[0]["max_ttft_s"]) == (0.5, 0.75)
    assert [bucket["requests"] for bucket in both] == [2, 1]
    assert [bucket["requests"] for bucket in last] == [1]
    assert activity.as_json("eve")["buckets"] == []
