"""Embeddings, scores and reranking: what is checked before anything is computed, counted and left."""

from __future__ import annotations

import socket
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from ramify import SamplingParams
from ramify.errors import InvalidParamsError
from ramify.models.configs.pooling import PoolingConfig
from ramify.server.openai.embeddings import MAX_INPUTS
from tests.pure.live_server import Live, live, until
from tests.pure.server_bench import ServerBench, ask, run

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["Who lives in Rome?", "Who lives in Oslo?"]},
    "/v1/score": {"text_1": "Rome", "text_2": ["Oslo", "Paris"]},
    "/v1/rerank": {"query": "Rome", "documents": ["Oslo", "Paris"]},
}
PROMPTS = {"query": "Query: ", "document": "Text: "}


@pytest.mark.parametrize("path", REQUESTS)
def test_no_generated_token_is_counted(path: str) -> None:
    """Neither in the metrics nor in the load line; prompt tokens are."""
    bench = ServerBench()

    async def main() -> str:
        async with bench.running():
            answer = await bench.post(path, REQUESTS[path])
            assert answer.status == 200, answer.body
            return (await bench.call("GET", "/metrics")).body.decode()

    metrics = dict(line.rsplit(" ", 1) for line in run(main()).splitlines() if line[:1] != "#")

    assert float(metrics["ramify_prompt_tokens_total"]) > 0
    assert float(metrics["ramify_generation_tokens_total"]) == 0
    assert float(metrics['vllm:generation_tokens_total{model_name="tiny"}']) == 0
    assert float(metrics["ramify_request_generation_tokens_sum"]) == 0
    assert bench.server.metrics.num_output == 0


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": "a", "dimensions": 17}, "dimensions is 17; this model has 16"),
        ("/v1/embeddings", {"input": ["a"] * (MAX_INPUTS + 1)}, "2049 inputs, the limit is 2048"),
        ("/v1/score", {"text_1": ["a"] * 1025, "text_2": ["b"] * 1025}, "2050 inputs, the limit"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * MAX_INPUTS}, "2049 inputs, the limit"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "no prompts"),
        ("/v1/embeddings", {"input": ""}, "input is empty"),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"text": 5}]}, "documents[1] is neither"),
        ("/v1/rerank", {"query": "a", "documents": [{"text": ["b"]}]}, "documents[0] is neither"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0] is neither"),
    ],
)
def test_nothing_is_computed_for_a_refused_request(
    path: str, body: dict[str, Any], message: str
) -> None:
    """400 with the value and the limit, before the first step."""
    bench = ServerBench(max_waiting=4096)

    async def main() -> Any:
        async with bench.running():
            answer = await bench.post(path, body)
            return answer, await bench.llm.run(lambda core: core.num_steps)

    answer, num_steps = run(main())

    assert (answer.status, num_steps) == (400, 0)
    assert message in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": [5, -1]}, "input[1]"),
        ("/v1/embeddings", {"input": [5, 2**31]}, "input[1]"),
        ("/v1/embeddings", {"input": [[5], [6, "a"]]}, "input[1][1]"),
        ("/v1/embeddings", {"input": [[5], [6, 7, -3]]}, "input[1][2]"),
        ("/v1/completions", {"prompt": [5, -1]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [[5], [6, -1]]}, "prompt[1][1]"),
    ],
)
def test_a_wrong_token_id_is_named_as_the_client_sent_it(
    path: str, body: dict[str, Any], param: str
) -> None:
    """The parameter is the path of the id in the body."""
    answer = ask(path, body)

    assert answer.status == 400
    assert answer.json["error"]["param"] == param


@pytest.mark.parametrize("path", REQUESTS)
def test_a_pooling_that_is_not_known_is_400(path: str) -> None:
    """With the checkpoint's file and mode; a completion is answered."""
    pooling = PoolingConfig(refusal="1_Pooling/config.json: the pooling mode is max")

    refused = ask(path, REQUESTS[path], pooling=pooling)
    served = ask("/v1/completions", {"prompt": "a", "max_tokens": 1}, pooling=pooling)

    assert (refused.status, served.status) == (400, 200)
    assert "pooling mode is max" in refused.json["error"]["message"]


def test_vectors_that_are_not_scaled_are_not() -> None:
    """A checkpoint without Normalize; its scores are still cosines."""
    pooling = PoolingConfig(is_normalised=False)

    [item] = ask("/v1/embeddings", {"input": "a"}, pooling=pooling).json["data"]
    [score] = ask("/v1/score", {"text_1": "a", "text_2": "a"}, pooling=pooling).json["data"]

    assert abs(np.linalg.norm(item["embedding"]) - 1) > 0.1
    assert score["score"] == pytest.approx(1, abs=1e-6)


def test_the_checkpoints_prompts_go_before_texts() -> None:
    """The default or a named one before each input; query and document before those of a ranking.

    Texts of a score have no roles: the default.
    """

    def vector(text: str, pooling: PoolingConfig | None = None, **fields: str) -> list[float]:
        [item] = ask("/v1/embeddings", {"input": text} | fields, pooling=pooling).json["data"]
        return list(item["embedding"])

    pooling = PoolingConfig(prompts=PROMPTS, default_prompt="document")
    document = np.array(vector("Text: Oslo"))

    [ranked] = ask(
        "/v1/rerank", {"query": "Rome", "documents": ["Oslo"]}, pooling=pooling
    ).json["results"]  # fmt: skip
    [scored] = ask(
        "/v1/score", {"text_1": "Rome", "text_2": "Oslo"}, pooling=pooling
    ).json["data"]  # fmt: skip

    assert vector("Oslo", pooling) == vector("Text: Oslo")
    assert vector("Oslo", pooling, prompt_name="query") == vector("Query: Oslo")
    assert ranked["relevance_score"] == pytest.approx(
        float(np.array(vector("Query: Rome")) @ document), abs=1e-6
    )
    assert scored["score"] == pytest.approx(
        float(np.array(vector("Text: Rome")) @ document), abs=1e-6
    )


def leave(running: Live, path: str, num_steps: int) -> None:
    """Send a request and close the connection when the engine has done so many steps of it."""
    request = httpx.Request("POST", running.url + path, json=REQUESTS[path])
    port = int(running.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request.content)}\r\n\r\n"
        client.sendall(head.encode() + request.content)
        running.gate.reached.acquire(timeout=30)
        for _ in range(num_steps):
            running.gate.allowed.release()
            running.gate.reached.acquire(timeout=30)


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_client_that_leaves_frees_everything(path: str, num_steps: int) -> None:
    """Before the first step, or while one input is computed and others wait: 499, nothing is left."""
    # A row and a step for one input at a time.
    with live(max_num_seqs=1) as running:
        running.gate.is_open = False
        leave(running, path, num_steps)
        until(lambda: not running.server.service.quotas.num_live)  # the engine is still held up

        running.gate.open()
        running.until_idle()

        name = f'ramify_http_responses_total{{route="{path}",status="499"}}'
        until(lambda: running.metrics().get(name) == 1)
        assert running.look(lambda core: core.num_steps) <= num_steps + 1
        assert running.post(path, REQUESTS[path]).status_code == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_embedding": "yes"}, "prompt_embedding='yes'.*True or False"),
        ({"prompt_embedding": 1}, "prompt_embedding=1"),
        ({"prompt_embedding": True, "pooling": "max"}, "pooling='max'.*'last', 'mean', 'cls'"),
        ({"prompt_embedding": True, "n": 2}, "n=2.*1 with prompt_embedding"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ],
)
def test_options_of_an_embedding_are_checked(options: dict[str, Any], message: str) -> None:
    """The value and what is possible, in one line."""
    with pytest.raises(InvalidParamsError, match=message):
        SamplingParams(**options)
