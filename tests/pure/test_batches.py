"""OpenAI's files and batches, with the official client against a server over a fake device."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import typer.main

from ramify.cli import app
from ramify.server.tenants import ApiKeys
from tests.pure.live_server import Live, live, until
from tests.pure.test_docs import blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "batches.md"
CHAT = "/v1/chat/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}


@contextmanager
def client_of(server: Live, key: str = "none") -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        yield client


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 4, "temperature": 0} | fields


def line(name: str, body: Any, **fields: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body} | fields


def jsonl(lines: list[Any]) -> bytes:
    texts = (item if isinstance(item, str) else json.dumps(item) for item in lines)
    return "".join(f"{text}\n" for text in texts).encode()


def upload(client: Any, data: bytes, **fields: Any) -> Any:
    return client.files.create(file=("lines.jsonl", data), purpose="batch", **fields)


def begin(client: Any, lines: list[Any], endpoint: str = CHAT, **fields: Any) -> Any:
    file = upload(client, jsonl(lines))
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )


def end_of(client: Any, batch: Any) -> Any:
    states: list[Any] = []

    def has_ended() -> bool:
        states[:] = [client.batches.retrieve(batch.id)]
        return bool(states[0].status in ENDED)

    until(has_ended)
    return states[0]


def results(client: Any, name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    lines = [json.loads(text) for text in client.files.content(name).text.splitlines()]
    by_id = {result["custom_id"]: result for result in lines}
    assert len(by_id) == len(lines), "one result for each line"
    return by_id


def test_a_batch_answers_as_the_endpoint_does(tmp_path: Path) -> None:
    """Every line has the body that the same request gets directly; counts and times are set."""
    texts = [f"Who lives in city {number}?" for number in range(9)]
    with live(batch_dir=tmp_path) as server, client_of(server) as client:
        batch = begin(client, [line(text, chat_body(text)) for text in texts], metadata={"a": "b"})
        assert (batch.status, batch.metadata) == ("validating", {"a": "b"})

        ended = end_of(client, batch)

        assert (ended.status, ended.error_file_id) == ("completed", None)
        counts = ended.request_counts
        assert (counts.total, counts.completed, counts.failed) == (9, 9, 0)
        assert ended.created_at <= ended.in_progress_at <= ended.completed_at < ended.expires_at
        answers = results(client, ended.output_file_id)
        assert answers.keys() == set(texts)
        for text in texts:
            direct = client.chat.completions.create(model="fake", **chat_body(text))
            response = answers[text]["response"]
            assert response["status_code"] == 200 and answers[text]["error"] is None
            assert response["body"]["choices"] == direct.to_dict()["choices"]
            assert response["request_id"].startswith("req_")
        assert client.batches.list().data[0].id == batch.id


@pytest.mark.parametrize(
    ("endpoint", "body", "key"),
    [
        ("/v1/completions", {"prompt": "Rome", "max_tokens": 2}, "choices"),
        ("/v1/embeddings", {"input": ["Rome", "Paris"]}, "data"),
        ("/v1/responses", {"input": "Rome", "max_output_tokens": 2}, "output"),
    ],
)
def test_every_endpoint_is_served(tmp_path: Path, endpoint: str, body: Any, key: str) -> None:
    """A line of each endpoint has a body of its form; nothing of it goes into the request history."""
    with live(batch_dir=tmp_path) as server, client_of(server) as client:
        ended = end_of(client, begin(client, [line("a", body, url=endpoint)], endpoint))

        answer = results(client, ended.output_file_id)["a"]["response"]
        assert answer["status_code"] == 200 and answer["body"][key]
        assert not len(server.server.service.history)


def test_a_clients_fault_is_a_line_of_the_error_file(tmp_path: Path) -> None:
    """Wrong requests have the endpoint's status and error; the others are answered."""
    with live(batch_dir=tmp_path) as server, client_of(server) as client:
        ended = end_of(
            client,
            begin(
                client,
                [
                    line("good", chat_body("Rome")),
                    line("hot", chat_body("Rome", temperature="hot")),
                    line("stream", chat_body("Rome", stream=True)),
                    line("empty", {}),
                    line("long", chat_body("word " * 4000)),
                ],
            ),
        )

        assert ended.status == "completed"
        assert (ended.request_counts.completed, ended.request_counts.failed) == (1, 4)
        assert results(client, ended.output_file_id).keys() == {"good"}
        errors = results(client, ended.error_file_id)
        assert errors.keys() == {"hot", "stream", "empty", "long"}
        assert {result["response"]["status_code"] for result in errors.values()} == {400}
        assert errors["hot"]["response"]["body"]["error"]["param"] == "temperature"
        code = errors["long"]["response"]["body"]["error"]["code"]
        assert code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([], "empty_file", None),
        (["{"], "invalid_json_line", 1),
        ([line("a", chat_body("x")), "[1]"], "invalid_json_line", 2),
        (["[" * 100_000], "invalid_json_line", 1),
        ([line("a", chat_body("x")), line("a", chat_body("y"))], "duplicate_custom_id", 2),
        ([line("a", chat_body("x"), url="/v1/completions")], "url_mismatch", 1),
        ([line("a", chat_body("x"), method="GET")], "invalid_method", 1),
        ([line("", chat_body("x"))], "invalid_custom_id", 1),
        ([line("a", 5)], "invalid_type", 1),
        ([{"custom_id": "a", "method": "POST", "url": CHAT}], "missing_required_parameter", 1),
        ([{"method": "POST", "url": CHAT, "body": {}}], "missing_required_parameter", 1),
        ([line("a", chat_body("x", model="other"))], "model_not_found", 1),
        ([line("a", chat_body("x")), line("b", chat_body("x", model="fake"))], "model_mismatch", 2),
    ],
)
def test_a_malformed_file_fails_with_its_line(
    tmp_path: Path, lines: list[Any], code: str, number: int | None
) -> None:
    """No line runs; the batch names the line and the fault."""
    with live(batch_dir=tmp_path) as server, client_of(server) as client:
        ended = end_of(client, begin(client, lines))

        assert ended.status == "failed" and ended.failed_at
        [error] = ended.errors.data
        assert (error.code, error.line) == (code, number)
        assert ended.output_file_id is None
        assert not server.metrics()['ramify_batch_lines_total{result="succeeded"}']


def test_files_are_listed_read_and_deleted(tmp_path: Path) -> None:
    """Pages, order, purpose, expiry; a deleted file is gone from the disk."""
    with live(batch_dir=tmp_path) as server, client_of(server) as client:
        names = [upload(client, f"{number}\n".encode() * 3).id for number in range(3)]
        file = client.files.retrieve(names[1])
        assert (file.bytes, file.filename, file.status) == (6, "lines.jsonl", "processed")
        assert client.files.content(names[1]).read() == b"1\n1\n1\n"
        short = upload(client, b"x", expires_after={"anchor": "created_at", "seconds": 3600})
        assert short.expires_at - short.created_at == 3600

        assert [stored.id for stored in client.files.list(limit=2)] == [short.id, *names[::-1]]
        page = client.files.list(limit=2, order="asc", after=names[0], purpose="batch")
        assert [stored.id for stored in page.data] == names[1:]
        assert page.has_more
        for name in names:
            assert client.files.delete(name).deleted
        assert [stored.id for stored in client.files.list()] == [short.id]
        with pytest.raises(openai.NotFoundError):
            client.files.content(names[0])
        assert len(list(tmp_path.glob("*/file-*"))) == 2  # bytes and record
        for path in tmp_path.glob("*/*"):
            assert path.stat().st_mode & 0o777 == 0o600
        assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*/")} == {0o700}


def test_tenants_see_their_own_only(tmp_path: Path) -> None:
    """Files and batches of another tenant are not there: to read, to use, to cancel, to delete."""
    keys = ApiKeys.of("ann", "bob")
    with (
        live(keys, batch_dir=tmp_path) as server,
        client_of(server, "ann") as ann,
        client_of(server, "bob") as bob,
    ):
        batch = end_of(ann, begin(ann, [line("a", chat_body("Rome"))]))
        assert batch.status == "completed"

        assert not bob.files.list().data and not bob.batches.list().data
        for call in (
            lambda: bob.files.retrieve(batch.input_file_id),
            lambda: bob.files.content(batch.output_file_id),
            lambda: bob.files.delete(batch.input_file_id),
            lambda: bob.batches.retrieve(batch.id),
            lambda: bob.batches.cancel(batch.id),
            lambda: bob.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert len(ann.files.list().data) == 2


def test_without_a_directory_the_error_names_the_option() -> None:
    """Every endpoint says how to switch files and batches on."""
    with live() as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="--batch-dir"):
            upload(client, b"x")
        with pytest.raises(openai.BadRequestError, match="--batch-dir"):
            client.batches.list()


def test_every_block_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its Python blocks run in order, against a server; it names the options that exist."""
    page = PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    with live(batch_dir=tmp_path, model="ramify-tiny") as server:
        for number, code in enumerate(blocks(page, "python")):
            here = code.replace("http://127.0.0.1:8000", server.url)
            exec(compile(here, f"batches, block {number}", "exec"), names)
        for client in (names["client"], names["claude"]):
            client.close()

    printed = capsys.readouterr().out.splitlines()
    answers = {f"{name}-{number}" for name in ("question", "city") for number in range(8)}
    assert {text.split()[0] for text in printed} == {"completed", *answers}
    group: Any = typer.main.get_command(app)
    known = {option for parameter in group.commands["serve"].params for option in parameter.opts}
    assert set(re.findall(r"--[a-z-]{4,}", page)) <= known
    codes = set(re.findall(r"`([a-z]+_[a-z_]+)`", page))
    assert {"url_mismatch", "model_mismatch", "too_many_tasks"} <= codes
