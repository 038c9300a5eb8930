"""Anthropic's message batches, with the official client against a server over a fake device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest

from ramify.server.tenants import ApiKeys
from tests.pure.live_server import LIMIT_S, Live, live, until
from tests.pure.test_batches import client_of as openai_client
from tests.pure.test_batches_life import answered, stop_batches


@contextmanager
def client_of(server: Live, key: str = "none") -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
        yield client


def params(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "fake", "max_tokens": 4, "temperature": 0, "messages": messages} | fields


def requests(count: int) -> list[dict[str, Any]]:
    return [{"custom_id": f"r{n}", "params": params(f"City {n}\n\t{n}")} for n in range(count)]


def begin(client: Any, items: list[Any]) -> Any:
    return client.messages.batches.create(requests=items)


def end_of(client: Any, batch: Any) -> Any:
    states: list[Any] = []

    def has_ended() -> bool:
        states[:] = [client.messages.batches.retrieve(batch.id)]
        return bool(states[0].processing_status == "ended")

    until(has_ended)
    return states[0]


def results(client: Any, batch: Any) -> dict[str, Any]:
    entries = list(client.messages.batches.results(batch.id))
    by_id = {entry.custom_id: entry.result for entry in entries}
    assert len(by_id) == len(entries), "one result for each request"
    return by_id


def test_a_batch_answers_as_the_endpoint_does(tmp_path: Path) -> None:
    """Every result has the message of the same request; counts show once the batch has ended."""
    with live(batch_dir=tmp_path) as server, client_of(server) as client:
        batch = begin(client, requests(7))
        assert (batch.processing_status, batch.request_counts.processing) == ("in_progress", 7)
        assert batch.results_url is None and batch.ended_at is None
        assert (batch.expires_at - batch.created_at).total_seconds() == 24 * 3600

        ended = end_of(client, batch)

        assert (ended.request_counts.succeeded, ended.request_counts.processing) == (7, 0)
        assert ended.results_url.startswith(server.url)
        answers = results(client, ended)
        assert answers.keys() == {f"r{number}" for number in range(7)}
        for item in requests(7):
            direct = server.post("/v1/messages", item["params"]).json()
            answer = answers[item["custom_id"]]
            assert answer.type == "succeeded"
            assert answer.message.to_dict()["content"] == direct["content"]
            assert answer.message.usage.output_tokens == direct["usage"]["output_tokens"]
        with openai_client(server) as other:  # neither is one of the other API
            assert not other.batches.list().data and not other.files.list().data


def test_a_clients_fault_is_an_errored_result(tmp_path: Path) -> None:
    """With the error of the endpoint; each request may name a model of its own."""
    items = [
        {"custom_id": "good", "params": params("Rome")},
        {"custom_id": "model", "params": params("Rome", model="other")},
        {"custom_id": "hot", "params": params("Rome", temperature=9)},
        {"custom_id": "stream", "params": params("Rome", stream=True)},
        {"custom_id": "empty", "params": {}},
    ]
    with live(batch_dir=tmp_path) as server, client_of(server) as client:
        ended = end_of(client, begin(client, items))

        counts = ended.request_counts
        assert (counts.succeeded, counts.errored) == (1, 4)
        answers = results(client, ended)
        kinds = {
            name: answer.error.error.type for name, answer in answers.items() if name != "good"
        }
        assert kinds.pop("model") == "not_found_error"
        assert set(kinds.values()) == {"invalid_request_error"}


def test_a_cancelled_batch_has_a_result_for_each_request_and_can_be_deleted(
    tmp_path: Path,
) -> None:
    """Requests without an answer are canceled; nothing of a deleted batch stays on the disk."""
    with live(batch_dir=tmp_path, max_num_seqs=4) as server, client_of(server) as client:
        server.gate.is_open = False
        batch = begin(client, requests(12))
        while not answered(server):
            server.gate.allowed.release()
            assert server.gate.reached.acquire(timeout=LIMIT_S)
        for call in (client.messages.batches.delete, client.messages.batches.results):
            with pytest.raises(anthropic.AnthropicError):
                call(batch.id)

        state = client.messages.batches.cancel(batch.id)
        assert state.processing_status in ("canceling", "ended") and state.cancel_initiated_at
        server.gate.open()
        ended = end_of(client, batch)

        counts = ended.request_counts
        assert counts.succeeded > 0 and counts.canceled > 0
        assert counts.succeeded + counts.canceled == 12
        kinds = [answer.type for answer in results(client, ended).values()]
        assert (kinds.count("succeeded"), kinds.count("canceled")) == (
            counts.succeeded,
            counts.canceled,
        )
        assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.retrieve(batch.id)
        assert not list(tmp_path.glob("*/*"))
        assert not server.metrics()["ramify_batch_disk_bytes"]


def test_a_restart_goes_on(tmp_path: Path) -> None:
    """A batch whose server has gone is ended by the next."""
    with live(batch_dir=tmp_path, max_num_seqs=4) as server, client_of(server) as client:
        server.gate.is_open = False
        batch = begin(client, requests(9))
        while not answered(server):
            server.gate.allowed.release()
            assert server.gate.reached.acquire(timeout=LIMIT_S)
        stop_batches(server)

    with live(batch_dir=tmp_path) as server, client_of(server) as client:
        ended = end_of(client, batch)
        assert ended.request_counts.succeeded == 9
        assert len(results(client, ended)) == 9
        assert 0 < answered(server) < 9


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "requests"),
        ({"requests": []}, "requests"),
        ({"requests": 5}, "requests"),
        ({"requests": [5]}, "requests[0]"),
        ({"requests": [{"custom_id": "a"}]}, "requests[0]"),
        (
            {"requests": [{"custom_id": "a b", "params": {}}]},
            'requests[0].custom_id: "a b" is not possible. A custom_id has 1 to 64 characters',
        ),
        ({"requests": [{"custom_id": "a", "params": 5}]}, "requests[0].params"),
        ({"requests": [{"custom_id": "a", "params": {}}] * 2}, "requests[1].custom_id"),
    ],
)
def test_malformed_batches_are_refused(tmp_path: Path, body: Any, where: str) -> None:
    """400 that names the request; nothing is stored."""
    with live(batch_dir=tmp_path) as server:
        answer = server.post("/v1/messages/batches", body)

        assert answer.status_code == 400
        assert where in answer.json()["error"]["message"]
        assert not list(tmp_path.glob("*/*"))


def test_batches_are_listed_for_their_tenant(tmp_path: Path) -> None:
    """Newest first, by pages in both directions; another tenant sees none."""
    with (
        live(ApiKeys.of("ann", "bob"), batch_dir=tmp_path) as server,
        client_of(server, "ann") as ann,
        client_of(server, "bob") as bob,
    ):
        names = [begin(ann, requests(1)).id for _ in range(3)]

        newest_first = [batch.id for batch in ann.messages.batches.list(limit=2)]
        assert sorted(newest_first) == sorted(names)
        page = ann.messages.batches.list(limit=1, before_id=newest_first[2])
        assert [batch.id for batch in page.data] == [newest_first[1]] and page.has_more
        assert not bob.messages.batches.list().data
        for call in (bob.messages.batches.retrieve, bob.messages.batches.cancel):
            with pytest.raises(anthropic.NotFoundError):
                call(names[0])
        key = {"x-api-key": "ann"}
        assert server.get("/v1/messages/batches?limit=0", headers=key).status_code == 400
        error = server.get("/v1/messages/batches?after_id=x", headers=key)
        assert json.loads(error.text)["error"]["type"] == "invalid_request_error"
