"""Paths and methods: aliases without /v1, 405 with `Allow`, HEAD, CORS, routes not yet served."""

from collections.abc import Mapping
from typing import Any

import pytest

from ramify.server.app import Server
from ramify.server.routes import ENDPOINTS
from ramify.server.tenants import ApiKeys
from tests.pure.server_bench import Answer, ServerBench, ask, chat, run

PAGE = "https://page.example"


def call(
    method: str,
    path: str,
    body: object = b"",
    *,
    headers: Mapping[str, str] | None = None,
    origins: tuple[str, ...] = (),
    keys: ApiKeys | None = None,
    key: str | None = None,
) -> Answer:
    bench = ServerBench(keys=keys)
    if origins:
        bench.server = Server(bench.service, keys, allowed_origins=origins)
        bench.app = bench.server.app(bench._lifespan)

    async def main() -> Answer:
        async with bench.running():
            return await bench.call(method, path, body, headers=headers, key=key)

    return run(main())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", chat("Hi")),
        ("/completions", {"prompt": "Hi", "max_tokens": 2}),
        ("/responses", {"input": "Hi", "max_output_tokens": 2}),
        ("/messages", chat("Hi", model="tiny")),
    ],
)
def test_a_base_url_without_v1_works(path: str, body: dict[str, Any]) -> None:
    """The same answer, and the same error's form, as with /v1."""
    answers, errors = (
        [ask(prefix + path, value) for prefix in ("", "/v1")] for value in (body, {"model": 5})
    )

    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].json.keys() == answers[1].json.keys()
    assert errors[0].status == errors[1].status == 400
    assert errors[0].json["error"] == errors[1].json["error"]


def test_no_alias_hides_another_endpoint() -> None:
    """Every path with its method belongs to one endpoint."""
    owned = [(path, endpoint.method) for endpoint in ENDPOINTS for path in endpoint.paths]

    assert len(owned) == len(set(owned))


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("PUT", "/v1/cache", {"GET", "HEAD", "DELETE"}),
        ("POST", "/v1/responses/x", {"GET", "HEAD", "DELETE"}),
        ("OPTIONS", "/v1/models", {"GET", "HEAD"}),
    ],
)
def test_a_wrong_method_is_405_with_the_right_ones(
    method: str, path: str, allowed: set[str]
) -> None:
    """`Allow` has the methods of all endpoints of the path."""
    answer = call(method, path)

    assert answer.status == 405
    assert set(answer.headers["allow"].split(", ")) == allowed
    assert answer.json["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version", "/models"])
def test_head_answers_as_get_does(path: str) -> None:
    """Status and headers are those of GET."""
    head, get = call("HEAD", path), call("GET", path)

    assert (head.status, head.headers["content-type"]) == (200, get.headers["content-type"])


def test_pages_of_allowed_origins_may_call() -> None:
    """A preflight names what is allowed; the answer lets the page read our headers.

    Origins may be given in any case, and with a slash.
    """
    origins = (PAGE.upper() + "/",)
    asks = {"origin": PAGE, "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization,content-type"
    keys = ApiKeys.of("ann")

    preflight = call("OPTIONS", "/v1/chat/completions", headers=asks, origins=origins, keys=keys)
    answer = call(
        "POST",
        "/v1/chat/completions",
        chat("Hi"),
        headers={"origin": PAGE},
        origins=origins,
        keys=keys,
        key="ann",
    )

    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "X-Ramify-Warning" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("origins", [(), (PAGE,)])
def test_other_pages_may_not_read_an_answer(origins: tuple[str, ...]) -> None:
    """By default none may; the allowance of one page is not another's."""
    answer = call("GET", "/v1/models", headers={"origin": "https://evil.example"}, origins=origins)

    assert "access-control-allow-origin" not in answer.headers


def test_the_tokenizer_is_described() -> None:
    """What a remote tokenizer asks for: template, special tokens by role, class; only with a key."""
    described = call("GET", "/tokenizer_info").json
    refused = call("GET", "/tokenizer_info", keys=ApiKeys.of("ann"))

    assert described["eos_token"] == "<|end|>"
    assert "<|" in described["chat_template"]
    assert described["tokenizer_class"]
    assert refused.status == 401


def test_models_have_a_display_name() -> None:
    """In the list and by itself."""
    listed, single = call("GET", "/v1/models").json, call("GET", "/models/tiny").json

    assert listed["data"][0]["display_name"] == single["display_name"] == "tiny"


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/embeddings", "/v1/score", "/score", "/rerank", "/v2/rerank", "/pooling"],
)
def test_what_no_model_here_can_do_is_refused_with_the_reason(path: str) -> None:
    """400, which clients do not retry; another model's name is 404 as everywhere."""
    served = ask(path, {"model": "tiny", "input": ["x"]})
    unknown = ask(path, {"model": "bge", "input": ["x"]})

    assert (served.status, served.json["error"]["code"]) == (400, "model_not_supported")
    assert "does not support" in served.json["error"]["message"]
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
