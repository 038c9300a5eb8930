"""What web pages of other sites can make a browser send is refused; other clients notice nothing."""

from typing import Any

import pytest

from ramify.server.routes import ENDPOINTS
from ramify.server.run import ServeOptions, hosts_to_answer
from ramify.server.tenants import ApiKeys
from tests.pure.server_bench import Answer, ServerBench, chat, run

CHAT = "/v1/chat/completions"
LOCAL = hosts_to_answer(ServeOptions(), has_keys=False)
TEXT, JSON = "text/plain;charset=UTF-8", "application/json"
HERE = "127.0.0.1:8000"


def ask(bench: ServerBench, headers: dict[str, str], method: str = "POST", path: str = CHAT) -> Any:
    return bench.call(method, path, chat("x") if method == "POST" else b"", headers=headers)


REQUESTS: tuple[tuple[dict[str, str], int], ...] = (
    # No browser.
    ({}, 200),
    ({"host": HERE}, 200),
    ({"host": "localhost:8000"}, 200),
    ({"host": "LOCALHOST."}, 200),
    ({"host": "[::1]:8000"}, 200),
    ({"host": HERE, "content-type": "application/x-www-form-urlencoded"}, 200),  # curl -d
    # DNS rebinding.
    ({"host": "evil.example:8000"}, 403),
    ({"host": "evil.example:8000", "origin": "http://evil.example:8000"}, 403),
    ({"host": "localhost.evil.example"}, 403),
    ({"host": "127.0.0.1.evil.example:80"}, 403),
    ({"host": "evil.example#localhost"}, 403),
    ({"host": "[::2]:8000"}, 403),
    ({"host": "[::1]evil.example"}, 403),
    ({"host": "localhost:evil.example"}, 403),
    ({"host": ""}, 403),
    # Requests across sites.
    ({"host": HERE, "origin": "https://evil.example"}, 403),
    ({"host": HERE, "origin": "https://evil.example", "content-type": TEXT}, 403),
    ({"host": HERE, "origin": "null"}, 403),
    ({"host": HERE, "origin": ""}, 403),
    ({"host": HERE, "origin": "http://localhost:3000"}, 403),
    ({"host": HERE, "sec-fetch-site": "cross-site"}, 403),
    ({"host": HERE, "sec-fetch-site": "same-site"}, 403),
    # Pages of the server itself, and of an origin that is allowed.
    ({"host": HERE, "origin": f"http://{HERE}", "sec-fetch-site": "same-origin"}, 200),
    ({"host": HERE, "origin": "https://app.example", "sec-fetch-site": "cross-site"}, 200),
    ({"host": HERE, "origin": "https://app.example:444"}, 403),
    # Forms.
    ({"host": HERE, "origin": f"http://{HERE}", "content-type": TEXT}, 415),
    ({"host": HERE, "referer": "https://evil.example/", "content-type": TEXT}, 415),
    ({"host": HERE, "sec-fetch-site": "none", "content-type": "multipart/form-data"}, 415),
)


@pytest.mark.parametrize(("headers", "status"), REQUESTS)
def test_requests_of_pages_elsewhere_are_refused(headers: dict[str, str], status: int) -> None:
    """403 for Host and Origin, 415 for a form, and nothing runs; with keys, pages have no key."""

    async def main() -> list[Answer]:
        answers = []
        for keys, hosts in ((None, LOCAL), (ApiKeys.of("key"), None)):
            bench = ServerBench(
                keys=keys, allowed_hosts=hosts, allowed_origins=["https://App.example/"]
            )
            sent = {"content-type": JSON, **headers}
            if keys is not None:
                sent["authorization"] = "Bearer key"
            async with bench.running():
                answers.append(await ask(bench, sent))
            assert (bench.device.num_steps > 0) == (answers[-1].status == 200)
        return answers

    without_keys, with_keys = run(main())
    assert (without_keys.status, with_keys.status) == (status, 200), without_keys.body
    if status != 200:
        assert without_keys.json["error"]["message"]


def test_every_path_is_guarded() -> None:
    """Admin calls, metrics and health too, in the form of the API; unknown paths as well."""

    async def main() -> None:
        async with ServerBench(allowed_hosts=LOCAL).running() as bench:
            paths = [(row.method, row.path.replace("{name}", "1")) for row in ENDPOINTS]
            for method, path in (*paths, ("GET", "/nothing"), ("OPTIONS", CHAT)):
                for headers in ({"host": "evil.example"}, {"host": HERE, "origin": "http://e.x"}):
                    answer = await bench.call(method, path, headers=headers)
                    assert answer.status == 403, (method, path)
                    is_anthropic = path.startswith("/v1/messages")
                    assert (answer.json.get("type") == "error") == is_anthropic

    run(main())


@pytest.mark.parametrize(
    ("options", "has_keys", "expected"),
    [
        ({}, True, None),
        ({"host": "0.0.0.0", "insecure": True}, False, None),
        ({"host": "127.0.0.2"}, False, "127.0.0.2"),
        ({"host": "::1"}, False, "::1"),
        ({"host": "0.0.0.0", "allowed_hosts": ("a.example",)}, True, "a.example"),
    ],
)
def test_the_hosts_that_are_answered(
    options: dict[str, Any], has_keys: bool, expected: str | None
) -> None:
    """Without keys, on this machine, those that mean it; what the operator adds comes on top."""
    hosts = hosts_to_answer(ServeOptions(**options), has_keys=has_keys)

    if expected is None:
        assert hosts is None
    else:
        assert hosts is not None
        assert {"localhost", "127.0.0.1", "[::1]", expected} <= set(hosts)


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        (["a.example"], "a.example:1", 200),
        (["a.example"], "b.a.example", 403),
        (["*.a.example"], "b.a.example:1", 200),
        (["*.a.example"], "xa.example", 403),
        (["*"], "whatever", 200),
        (["::1"], "[::1]:7", 200),
    ],
)
def test_hosts_by_name(allowed: list[str], host: str, status: int) -> None:
    """A name, everything below a name, or all."""

    async def main() -> Answer:
        async with ServerBench(allowed_hosts=allowed).running() as bench:
            return await bench.call("GET", "/v1/models", headers={"host": host})

    assert run(main()).status == status


def test_nothing_is_redirected() -> None:
    """A redirect would name the host that the request named; that of the page's second address names none."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            for row in ENDPOINTS:
                path = row.path.replace("{name:path}", "x").replace("{name}", "1") + "/"
                answer = await bench.call(row.method, path, headers={"host": "evil.example"})
                assert answer.headers.get("location") == ("../ui" if path == "/ui/" else None)
                assert (300 <= answer.status < 400) == (path == "/ui/")

    run(main())
