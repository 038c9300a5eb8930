"""Paths and methods: aliases without /v1, 405 with `Allow`, HEAD, CORS, routes not yet served."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
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
    way_out = " or ".join(sorted(allowed - {"HEAD"}))
    assert answer.json["error"]["message"] == f"{method} is not possible at {path}; send {way_out}"


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


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/pooling"])
def test_embeddings_are_unit_vectors(path: str) -> None:
    """One for each input, equal for equal inputs, as numbers or base64; another model is 404."""
    answer = ask(path, {"model": "tiny", "input": ["a b", "c", "a b"]}).json
    encoded = ask(path, {"model": "tiny", "input": "a b", "encoding_format": "base64"}).json
    shorter = ask(path, {"model": "tiny", "input": "a b", "dimensions": 4}).json
    unknown = ask(path, {"model": "bge", "input": ["x"]})

    first, second, third = (np.array(item["embedding"]) for item in answer["data"])
    assert np.linalg.norm(first) == pytest.approx(1, abs=1e-6)
    assert first.tolist() == third.tolist() != second.tolist()
    decoded = np.frombuffer(base64.b64decode(encoded["data"][0]["embedding"]), "<f4")
    assert decoded.tolist() == pytest.approx(first.tolist())
    assert shorter["data"][0]["embedding"] == pytest.approx(
        (first[:4] / np.linalg.norm(first[:4])).tolist()
    )
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": []}, "input is empty"),
        ("/v1/embeddings", {"input": ["a", ""]}, "none of them empty"),
        ("/v1/embeddings", {"input": "a", "dimensions": 5000}, "dimensions is 5000"),
        ("/v1/embeddings", {"input": [-1]}, "-1 is no token id"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1 has 2 texts"),
        ("/v1/rerank", {"query": "a", "documents": []}, "no document"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query is empty"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"text": ""}]}, "documents[1] is empty"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"x": "a"}]}, "documents[1] is neither"),
        ("/v1/score", {"text_1": "a", "text_2": [""]}, "text_2 must be texts"),
    ],
)
def test_bad_inputs_of_embeddings_are_named(path: str, body: dict, message: str) -> None:
    """400 with the field, and nothing is left behind."""
    refused = ask(path, {"model": "tiny", **body})

    assert refused.status == 400
    assert message in refused.json["error"]["message"]


def test_scores_and_ranks_are_cosine_similarities() -> None:
    """Of the embeddings of the same texts."""
    texts = ["q", "d e", "f", "q"]
    vectors = np.array(
        [item["embedding"] for item in ask("/v1/embeddings", {"input": texts}).json["data"]]
    )
    expected = vectors[1:] @ vectors[0]

    scores = ask("/score", {"text_1": "q", "text_2": texts[1:]}).json["data"]
    ranked = ask(
        "/v2/rerank",
        {"query": "q", "documents": texts[1:], "top_n": 2, "return_documents": True},
    ).json["results"]

    assert [item["score"] for item in scores] == pytest.approx(expected.tolist(), abs=1e-6)
    assert ranked[0] == {
        "index": 2,
        "relevance_score": pytest.approx(1, abs=1e-6),
        "document": {"text": "q"},
    }
    assert len(ranked) == 2
