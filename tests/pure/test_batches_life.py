"""Batches over time: restart, cancel, expiry, order, priority, room on the disk."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import openai
import pytest

from ramify.errors import ConfigError
from ramify.server.app import Server
from ramify.server.batches import batch_run
from ramify.server.batches.directory import BatchDirectory
from ramify.server.batches.lines import LineAnswer
from ramify.server.batches.records import BatchRecord
from ramify.server.batches.runner import BatchRunner
from ramify.server.generation import Generation
from ramify.server.tenants import ApiKeys, Caller, Quota, hash_key
from tests.pure.live_server import LIMIT_S, Live, live, until
from tests.pure.test_batches import (
    begin,
    chat_body,
    client_of,
    end_of,
    jsonl,
    line,
    results,
    upload,
)


def runner_of(server: Live) -> BatchRunner:
    assert server.server.batches is not None
    return server.server.batches.runner


def answered(server: Live) -> int:
    return runner_of(server).results["succeeded"]


def ask_as(server: Live, key: str) -> httpx.Response:
    body = {"prompt": "Who lives in Rome?", "max_tokens": 4}
    return server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})


def stop_batches(server: Live) -> None:
    """Give up the lines in flight, as the end of a server does."""
    closing = asyncio.run_coroutine_threadsafe(runner_of(server).aclose(), server.loop)
    closing.result(LIMIT_S)


def city_lines(count: int) -> list[dict[str, Any]]:
    return [line(str(number), chat_body(f"City {number}")) for number in range(count)]


def answer_some(server: Live, client: Any, lines: list[Any]) -> Any:
    """Begin a batch whose engine stands still after a few answers."""
    server.gate.is_open = False
    batch = begin(client, lines)
    while not answered(server):
        server.gate.allowed.release()
        assert server.gate.reached.acquire(timeout=LIMIT_S)
    return batch


def result_file(folder: Path) -> Path:
    [path] = [path for path in folder.glob("*/file-*") if b"batch_req" in path.read_bytes()]
    return path


def test_a_restart_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Lines with a result are not run again; each has one result, also where a write was cut off."""
    with live(batch_dir=tmp_path, max_num_seqs=4) as server, client_of(server) as client:
        batch = answer_some(server, client, city_lines(20))
        stop_batches(server)
    output = result_file(tmp_path)
    num_before = len(output.read_bytes().splitlines())
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_1","custom_id":"7","respon')

    with live(batch_dir=tmp_path, max_num_seqs=4) as server, client_of(server) as client:
        ended = end_of(client, batch)

        assert (ended.status, ended.request_counts.completed) == ("completed", 20)
        assert results(client, ended.output_file_id).keys() == {str(n) for n in range(20)}
        assert 0 < num_before < 20
        assert answered(server) == 20 - num_before
        assert client.files.retrieve(ended.output_file_id).purpose == "batch_output"


def test_a_cancelled_batch_has_a_result_for_each_line(tmp_path: Path) -> None:
    """Answers that are there stay, the others say that they were cancelled; nothing is left."""
    with live(batch_dir=tmp_path, max_num_seqs=4) as server, client_of(server) as client:
        batch = answer_some(server, client, city_lines(20))

        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        server.gate.open()
        ended = end_of(client, batch)

        assert ended.status == "cancelled" and ended.cancelled_at
        good = results(client, ended.output_file_id)
        left = results(client, ended.error_file_id)
        assert good and left
        assert good.keys() | left.keys() == {str(number) for number in range(20)}
        assert not good.keys() & left.keys()
        assert {result["error"]["code"] for result in left.values()} == {"batch_cancelled"}
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
        server.until_idle()


def test_a_batch_past_its_time_expires(tmp_path: Path) -> None:
    """What was not answered within 24 hours, a stop of the server included, says so."""
    with live(batch_dir=tmp_path, max_num_seqs=4) as server, client_of(server) as client:
        batch = answer_some(server, client, city_lines(8))
        stop_batches(server)
    [record] = tmp_path.glob("*/batch_*.json")
    stored = msgspec.json.decode(record.read_bytes(), type=BatchRecord)
    record.write_bytes(msgspec.json.encode(msgspec.structs.replace(stored, expires_at=1)))

    with live(batch_dir=tmp_path) as server, client_of(server) as client:
        ended = end_of(client, batch)

        assert ended.status == "expired" and ended.expired_at
        left = results(client, ended.error_file_id)
        assert {result["error"]["code"] for result in left.values()} == {"batch_expired"}
        good = results(client, ended.output_file_id)
        assert good.keys() | left.keys() == {str(number) for number in range(8)}


def test_other_requests_go_before_lines_that_wait(tmp_path: Path) -> None:
    """A request has its first token before every line that had not begun; of any tenant."""
    keys = ApiKeys.of("ann", "bob")
    begun: list[str] = []
    with live(keys, batch_dir=tmp_path, max_num_seqs=4) as server:
        service = server.server.service

        def note(generation: Generation, _: Any) -> None:
            if not generation.num_output:
                return
            name = "line" if generation.caller.is_background else generation.caller.tenant
            if generation.id not in seen:
                begun.append(name)
                seen.add(generation.id)

        seen: set[str] = set()
        service.event_listeners.append(note)
        with client_of(server, "ann") as client:
            server.gate.is_open = False
            batch = begin(client, city_lines(30))
            assert server.gate.reached.acquire(timeout=30)
            assert service.live.num_waiting(None) <= 2  # half of the rows
            threads = [
                threading.Thread(target=ask_as, args=(server, key)) for key in ("ann", "bob")
            ]
            for thread in threads:
                thread.start()
            until(lambda: service.live.num_foreground_waiting == 2)
            server.gate.open()
            for thread in threads:
                thread.join()
            end_of(client, batch)

    assert begun.count("line") == 30
    first_lines = next(index for index, name in enumerate(begun) if name != "line")
    assert first_lines <= 2
    assert {name != "line" for name in begun[first_lines : first_lines + 2]} == {True}


def test_lines_run_in_the_order_of_their_prefixes(tmp_path: Path) -> None:
    """In a pool that holds two of six prompts, most tokens are read; in the file's order few are."""
    prefixes = [
        f"{number} " + f"The city of number {number} has a history. " * 6 for number in range(6)
    ]
    bodies = [
        chat_body(f"{prefix} Question {question}?", max_tokens=1)
        for question in range(5)
        for prefix in prefixes
    ]

    def counts(server: Live) -> tuple[float, float]:
        metrics = server.metrics()
        sources = {
            source: metrics[f'ramify_prompt_tokens_by_source_total{{source="{source}"}}']
            for source in ("read", "shared", "computed")
        }
        return sources["read"] + sources["shared"], sum(sources.values())

    options: dict[str, Any] = {"pool_tokens": 320, "max_num_seqs": 4}
    with live(**options) as server, client_of(server) as client:
        for body in bodies:
            client.chat.completions.create(model="fake", **body)
        in_file_order, num_tokens = counts(server)
    with live(batch_dir=tmp_path, **options) as server, client_of(server) as client:
        lines = [line(str(number), body) for number, body in enumerate(bodies)]
        ended = end_of(client, begin(client, lines))
        assert ended.request_counts.completed == 30
        by_prefix, num_batch_tokens = counts(server)

    assert num_tokens == num_batch_tokens
    assert in_file_order < 0.2 * num_tokens
    assert by_prefix > 0.7 * num_tokens


def test_quotas_of_a_tenant_count_its_batches_by_themselves(tmp_path: Path) -> None:
    """A batch runs with the tenant's quota; a request beside it is not refused for the batch's use."""
    quota = Quota(max_requests=1)
    keys = ApiKeys({hash_key("ann"): Caller("ann", quota=quota)})
    options: dict[str, Any] = {"batch_dir": tmp_path, "max_num_seqs": 2}
    with live(keys, **options) as server, client_of(server, "ann") as client:
        batch = answer_some(server, client, city_lines(4))
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(ask_as(server, "ann")))
        asking.start()
        until(lambda: server.server.service.live.num_foreground_waiting == 1)
        server.gate.open()
        asking.join()
        assert answers[0].status_code == 200
        assert end_of(client, batch).request_counts.completed == 4


def test_a_batch_that_its_quota_holds_up_holds_up_no_others(tmp_path: Path) -> None:
    """Lines that are refused for minutes have no rows meanwhile; another tenant's batch ends."""
    quota = Quota(tokens_per_minute=1)  # the first line uses up many minutes
    entries = {hash_key("ann"): Caller("ann", quota=quota), hash_key("bob"): Caller("bob")}
    options: dict[str, Any] = {"batch_dir": tmp_path, "max_num_seqs": 4}
    with (
        live(ApiKeys(entries), **options) as server,
        client_of(server, "ann") as ann,
        client_of(server, "bob") as bob,
    ):
        held_up = begin(ann, city_lines(12))
        until(lambda: answered(server) > 0)
        assert end_of(bob, begin(bob, city_lines(6))).request_counts.completed == 6
        assert ann.batches.retrieve(held_up.id).status == "in_progress"
        ann.batches.cancel(held_up.id)
        assert end_of(ann, held_up).status == "cancelled"


def test_lines_are_no_more_at_once_than_the_quota_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So none of them is refused, and sent again after a wait."""
    statuses: list[int] = []
    answer_line = Server.answer_line

    async def noted(server: Server, *arguments: Any) -> LineAnswer:
        answer = await answer_line(server, *arguments)
        statuses.append(answer.status)
        return answer

    monkeypatch.setattr(Server, "answer_line", noted)
    keys = ApiKeys({hash_key("ann"): Caller("ann", quota=Quota(max_requests=1))})
    options: dict[str, Any] = {"batch_dir": tmp_path, "max_num_seqs": 16}
    with live(keys, **options) as server, client_of(server, "ann") as client:
        assert end_of(client, begin(client, city_lines(12))).request_counts.completed == 12

    assert statuses == [200] * 12


def test_a_file_that_a_batch_reads_is_not_deleted(tmp_path: Path) -> None:
    """409 until the batch has ended."""
    with live(batch_dir=tmp_path, max_num_seqs=4) as server, client_of(server) as client:
        batch = answer_some(server, client, city_lines(6))
        with pytest.raises(openai.ConflictError, match=batch.id):
            client.files.delete(batch.input_file_id)
        server.gate.open()
        end_of(client, batch)
        assert client.files.delete(batch.input_file_id).deleted


def test_a_batch_whose_input_is_removed_by_hand_fails(tmp_path: Path) -> None:
    """At once, while it runs; what was answered can be read, and the error says what to do."""
    with live(batch_dir=tmp_path, max_num_seqs=4) as server, client_of(server) as client:
        batch = answer_some(server, client, city_lines(20))
        [path] = tmp_path.glob(f"*/{batch.input_file_id}")
        path.unlink()
        server.gate.open()
        ended = end_of(client, batch)

        assert ended.status == "failed"
        assert ended.errors.data[0].code == "input_file_missing"
        assert batch.input_file_id in ended.errors.data[0].message
        good = results(client, ended.output_file_id)
        assert 0 < len(good) == ended.request_counts.completed < 20
        server.until_idle()


def test_uploads_beyond_the_room_leave_nothing(tmp_path: Path) -> None:
    """413 names the limit; what was deleted makes room again."""
    with live(batch_dir=tmp_path, batch_bytes=100_000) as server, client_of(server) as client:
        file = upload(client, b"x" * 60_000)
        with pytest.raises(openai.APIStatusError, match="100000") as refused:
            upload(client, b"x" * 60_000)
        assert refused.value.status_code == 413
        assert len(list(tmp_path.glob("*/file-*"))) == 2
        client.files.delete(file.id)
        upload(client, b"x" * 60_000)
        assert server.metrics()["ramify_batch_disk_bytes"] == 64_096


def test_a_batch_waits_for_room_for_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on, and answers every line, once there is room."""
    monkeypatch.setattr(batch_run, "FULL_DISK_S", 0.05)
    with live(batch_dir=tmp_path, batch_bytes=30_000) as server, client_of(server) as client:
        ballast = upload(client, b"x" * 14_000)
        batch = begin(client, city_lines(10))
        until(lambda: server.metrics()["ramify_batch_disk_bytes"] > 29_000)
        assert client.batches.retrieve(batch.id).status == "in_progress"

        client.files.delete(ballast.id)

        assert end_of(client, batch).request_counts.completed == 10


def raw_upload(server: Live, content: bytes, kind: str) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/files", content=content, headers={"content-type": kind}, timeout=30
    )


FORM = "multipart/form-data; boundary=b"
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n'


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{}", "application/json", 415),
        (b"", "multipart/form-data", 415),
        (b"", FORM, 400),
        (b"garbage", FORM, 400),
        (PURPOSE + FILE, FORM, 400),  # cut off
        (PURPOSE + b"--b--\r\n", FORM, 400),  # no file
        (FILE + b"--b--\r\n", FORM, 400),  # no purpose
        (PURPOSE + FILE + FILE + b"--b--\r\n", FORM, 400),
        (PURPOSE.replace(b"batch", b"vision") + FILE + b"--b--\r\n", FORM, 400),
        (PURPOSE.replace(b"batch", b"x" * 5000) + FILE + b"--b--\r\n", FORM, 400),
        (PURPOSE * 20 + FILE + b"--b--\r\n", FORM, 200),  # the same field again
        (PURPOSE * 32 + FILE + b"--b--\r\n", FORM, 400),
        (b"--b\r\n" + b"a: b\r\n" * 500 + b"\r\nx\r\n--b--\r\n", FORM, 400),
        (PURPOSE + FILE + b"--b--\r\n", FORM, 200),
    ],
)
def test_malformed_forms_are_refused(
    tmp_path: Path, content: bytes, kind: str, status: int
) -> None:
    """With a status of the client's fault; nothing of the file stays."""
    with live(batch_dir=tmp_path) as server:
        answer = raw_upload(server, content, kind)

        assert answer.status_code == status, answer.text
        assert len(list(tmp_path.glob("*/file-*"))) == (2 if status == 200 else 0)
        assert bool(server.metrics()["ramify_batch_disk_bytes"]) == (status == 200)


def test_wrong_parameters_are_refused(tmp_path: Path) -> None:
    """400 and 404 that name the field."""
    with live(batch_dir=tmp_path) as server, client_of(server) as client:
        file = upload(client, jsonl(city_lines(1)))
        good = {
            "input_file_id": file.id,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        for field, value in (
            ("endpoint", "/v1/models"),
            ("completion_window", "1h"),
            ("input_file_id", "../../etc/passwd"),
            ("metadata", {"a": 5}),
            ("output_expires_after", {"anchor": "created_at", "seconds": 5}),
        ):
            answer = server.post("/v1/batches", good | {field: value})
            assert answer.status_code in (400, 404), (field, answer.text)
            assert str(answer.json()["error"]["param"]).startswith(field)
        for query in ("limit=0", "limit=x", "after=nothing", "limit=101"):
            assert server.get(f"/v1/batches?{query}").status_code == 400
        assert server.get("/v1/files?order=up").status_code == 400
        assert server.get("/v1/files/..%2f..%2flock").status_code == 404


def test_what_an_upload_leaves_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """Bytes without a record go; with a damaged record, nothing does, and the rest is served."""
    with live(batch_dir=tmp_path) as server, client_of(server) as client:
        file = upload(client, b"x")
        [folder] = {path.parent for path in tmp_path.glob("*/*")}
    orphan = folder / f"file-{'0' * 32}"
    orphan.write_bytes(b"half")
    damaged = folder / f"batch_{'0' * 32}.json"
    damaged.write_bytes(b'{"id": "batch_')

    for is_damaged in (True, False):
        if not is_damaged:
            damaged.unlink()
        with live(batch_dir=tmp_path) as server, client_of(server) as client:
            assert [stored.id for stored in client.files.list()] == [file.id]
            assert orphan.exists() == is_damaged


def test_two_servers_do_not_share_a_directory(tmp_path: Path) -> None:
    """The second is refused, with the way out."""
    with live(batch_dir=tmp_path), pytest.raises(ConfigError, match="--batch-dir"):
        BatchDirectory(tmp_path)
