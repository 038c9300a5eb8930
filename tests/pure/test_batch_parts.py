"""Parts of batches by themselves: order, results that were cut off, retries, slots."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.server.batches.anthropic_lines import AnthropicLines
from ramify.server.batches.batch_run import BatchRun, RunContext
from ramify.server.batches.directory import BatchDirectory, DiskSpace
from ramify.server.batches.journal import ResultJournal
from ramify.server.batches.lines import LineAnswer, LineForm, OpenAiLines
from ramify.server.batches.plan import BatchPlan
from ramify.server.batches.prefix_order import num_answers, prefix_key
from ramify.server.batches.records import BatchRecord, LineCounts, Result, StoredFile
from ramify.server.batches.slots import LineSlots
from ramify.server.batches.store import BatchStore
from ramify.server.live_requests import LiveRequests
from ramify.server.tenants import Caller
from tests.pure.test_batches import CHAT, chat_body, jsonl, line

FORM = OpenAiLines(CHAT)
NAMES = (f"file-{'1' * 32}", f"file-{'2' * 32}")


def record(**fields: Any) -> BatchRecord:
    output_id, error_id = NAMES
    values = {
        "id": f"batch_{'0' * 32}",
        "tenant": "ann",
        "api": "openai",
        "input_id": f"file-{'0' * 32}",
        "endpoint": CHAT,
        "output_id": output_id,
        "error_id": error_id,
        "created_at": 0,
        "expires_at": 2**40,
    }
    return msgspec.convert(values | fields, BatchRecord)


def key(**fields: Any) -> bytes:
    return prefix_key(json.dumps(fields).encode())


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": texts[0]}] + [
        {"role": "user", "content": text} for text in texts[1:]
    ]


def test_keys_are_equal_as_far_as_prompts_are() -> None:
    """The common beginning of two keys grows with that of the prompts, whichever field they stand in."""
    long, tools = "word " * 100, [{"name": "look", "text": "x" * 300}]

    def shared(first: bytes, second: bytes) -> int:
        pairs = enumerate(zip(first, second, strict=False))
        return next((number for number, (a, b) in pairs if a != b), min(len(first), len(second)))

    base = key(messages=talk(long, long, "end"))
    assert shared(base, key(messages=talk(long, long, "other"))) > shared(
        base, key(messages=talk(long, "other"))
    )
    assert shared(base, key(messages=talk(long, "other"))) > shared(
        base, key(messages=talk("other", long))
    )
    assert shared(key(system=long, tools=tools), key(system=long)) > 10
    assert shared(key(prompt=long + "a"), key(prompt=long + "b")) > 10
    assert shared(key(input=long + "a"), key(input=long + "b")) > 10
    for field in ("cache_salt", "prefix"):
        assert not shared(key(messages=talk(long), **{field: "x"}), key(messages=talk(long)))
    with_tools = json.dumps({"system": "other", "tools": tools}).encode()
    assert shared(
        prefix_key(with_tools, tools_first=True),
        prefix_key(with_tools.replace(b"other", b"third"), tools_first=True),
    ) > shared(prefix_key(with_tools), prefix_key(with_tools.replace(b"other", b"third")))


@pytest.mark.parametrize(
    "body",
    [b"", b"5", b"{", b'{"messages": 5}', b'{"messages": [5]}', b"[" * 10**6, b'{"a": "\xff"}'],
)
def test_a_body_that_is_no_request_has_some_key(body: bytes) -> None:
    """It is refused when its line runs."""
    assert isinstance(prefix_key(body), bytes)
    assert num_answers(body) == 1


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": "a", "n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1], [2]]}, 2),
        ({"input": ["a", "b", "c"]}, 3),
        ({"input": [{"role": "user", "content": "a"}]}, 1),
        ({"messages": [], "n": "x"}, 1),
    ],
)
def test_rows_of_a_request(fields: Any, count: int) -> None:
    """Answers that the engine computes at once."""
    assert num_answers(json.dumps(fields).encode()) == count


def planned(folder: Path, count: int) -> BatchPlan:
    path = folder / "input"
    path.write_bytes(jsonl([line(str(number), chat_body("x")) for number in range(count)]))
    return BatchPlan.read_file(path, FORM, lambda _: None)


def test_results_cut_off_anywhere_are_those_that_are_whole(tmp_path: Path) -> None:
    """Whatever a kill leaves of a file of results, whole lines count, and the rest is removed."""
    plan, directory = planned(tmp_path, 3), BatchDirectory(tmp_path / "batches")
    answer = LineAnswer(200, "req_1", b'{"text":"a \\n b"}')
    results = [FORM.answered(str(number), answer).data for number in range(3)]
    whole, batch = b"".join(results), record()
    directory.folder("ann").mkdir()
    output = directory.file("ann", NAMES[0])
    ends = list(itertools.accumulate(map(len, results), initial=0))

    async def recovered() -> tuple[int, int]:
        journal = ResultJournal(directory, DiskSpace(1 << 20, 1 << 20), batch, plan)
        await journal.close()
        return journal.counts.succeeded, sum(journal.is_done)

    near_ends = {
        end + step for end in ends for step in (-2, -1, 0, 1) if 0 <= end + step <= ends[-1]
    }
    for size in sorted(near_ends | set(range(0, ends[-1], 17))):
        output.write_bytes(whole[:size])
        count = sum(end <= size for end in ends[1:])
        assert asyncio.run(recovered()) == (count, count)
        assert output.read_bytes() == whole[: ends[count]]
    for junk in (results[0], b"\0" * 9, b"{}\n", b'{"custom_id":"9"}\n'):  # again, or of no line
        output.write_bytes(results[0] + junk)
        assert asyncio.run(recovered()) == (1, 1)
        assert output.read_bytes() == results[0]
    directory.close()


@pytest.mark.parametrize("form", [FORM, AnthropicLines()])
def test_a_result_is_one_line_for_every_reader(form: LineForm) -> None:
    """Clients split the text of a file by `str.splitlines`, which knows more ends of lines than JSON Lines."""
    text = "".join(map(chr, [*range(0x20), 0x85, 0x2028, 0x2029])) + "ü"
    answer = LineAnswer(200, "r", msgspec.json.encode({"text": text}))

    data = form.answered("a", answer).data

    [only] = data.decode().splitlines()
    result = json.loads(only)
    body = result["response"]["body"] if form is FORM else result["result"]["message"]
    assert body == {"text": text}
    assert form.result_of(data) == ("a", "succeeded")


def run_with(
    tmp_path: Path,
    call: Callable[[bytes], LineAnswer],
    count: int = 1,
    *,
    output: bytes = b"",
    **fields: Any,
) -> BatchRecord:
    """The end of a batch with these fields whose endpoint answers by `call`.

    Args:
        count: lines of the input; 0: it is not there.
        output: what an earlier process has left of results.
    """

    async def answer(path: str, body: bytes, caller: Caller, batch: str) -> LineAnswer:
        assert path == CHAT and caller.is_background and batch == record().id
        return call(body)

    async def main() -> BatchRecord:
        directory = BatchDirectory(tmp_path / "batches")
        store = BatchStore(directory, max_bytes=1 << 20, max_tenant_bytes=1 << 20)
        batch = record(**fields)
        await store.add_batch(batch)
        lines = [line(str(number), chat_body("x")) for number in range(count)]
        if lines:
            directory.file("ann", batch.input_id).write_bytes(jsonl(lines))
        if output:
            directory.file("ann", batch.output_id).write_bytes(output)
        context = RunContext(
            store,
            LineSlots(LiveRequests(), lambda: 4, lambda: True),
            answer,
            lambda tenant: Caller(tenant, is_background=True),
            lambda _: None,
            tools_first=False,
            results=Counter[Result](),
            plan_lock=asyncio.Lock(),
        )
        run = BatchRun(context, batch, FORM, asyncio.Lock())
        await run.run()
        await run._reach("cancelling")  # as a call that has waited for the end
        directory.close()
        return run.batch

    return asyncio.run(main())


GOOD = LineAnswer(200, "req_1", b"{}")


@pytest.mark.parametrize(
    ("answers", "num_errors"),
    [
        ([LineAnswer(503, "r", b"{}", 0.001)] * 5 + [GOOD], 0),
        ([LineAnswer(429, "r", b"{}", 0.001)] * 5 + [GOOD], 0),
        ([LineAnswer(200, "r", b"{}", 0.001, is_aborted=True)] * 2 + [GOOD], 0),
        ([LineAnswer(500, "r", b"{}", 0.001)] * 2 + [GOOD], 0),
        ([LineAnswer(500, "r", b"{}", 0.001)] * 3, 1),
        ([LineAnswer(400, "r", b"{}")], 1),
        ([LineAnswer(413, "r", b"{}")], 1),
    ],
)
def test_what_is_sent_again(tmp_path: Path, answers: list[LineAnswer], num_errors: int) -> None:
    """An overload, a shutdown and the first faults of the server are; a client's fault is not."""
    left = iter(answers)

    ended = run_with(tmp_path, lambda _: next(left))

    assert ended.status == "completed"
    assert (ended.counts.errored, ended.counts.succeeded) == (num_errors, 1 - num_errors)
    assert next(left, None) is None


def test_a_batch_without_its_input_keeps_its_results(tmp_path: Path) -> None:
    """After a restart: it fails; a result that was cut off is removed, and the file counts no byte of it."""
    whole = FORM.answered("0", GOOD).data

    ended = run_with(
        tmp_path,
        lambda _: GOOD,
        0,
        output=whole + whole[:9],
        status="in_progress",
        counts=LineCounts(total=5),
    )

    assert ended.status == "failed"
    assert ended.errors[0].code == "input_file_missing"
    assert (ended.has_output, ended.has_errors) == (True, False)
    assert ended.counts == LineCounts(total=5, succeeded=1)
    [path] = tmp_path.glob(f"batches/*/{NAMES[0]}")
    assert path.read_bytes() == whole


def test_the_first_line_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As an editor writes it; its line is read without it, and the others as they are."""
    path = tmp_path / "input"
    lines = [line(str(number), chat_body("x")) for number in range(2)]
    path.write_bytes(b"\xef\xbb\xbf" + jsonl(lines))

    plan = BatchPlan.read_file(path, FORM, lambda _: None)

    assert not plan.errors
    assert [json.loads(plan.read_line(number)) for number in range(2)] == lines


def test_results_of_an_unfinished_batch_are_in_use(tmp_path: Path) -> None:
    """They are published before its end; were they deleted, all of its lines would run again."""
    output = StoredFile(
        id=NAMES[0],
        tenant="ann",
        filename="output.jsonl",
        purpose="batch_output",
        num_bytes=0,
        created_at=0,
        expires_at=2**40,
    )

    async def users_by_status() -> list[BatchRecord | None]:
        directory = BatchDirectory(tmp_path)
        store = BatchStore(directory, max_bytes=1 << 20, max_tenant_bytes=1 << 20)
        await store.add_file(output)
        users: list[BatchRecord | None] = []
        for status in ("finalizing", "completed"):
            await store.add_batch(record(status=status))
            users.append(store.user_of(output))
        directory.close()
        return users

    during, after = asyncio.run(users_by_status())

    assert during is not None and during.id == record().id
    assert after is None


def test_slots_yield_to_other_requests() -> None:
    """Half of the rows, none while a request waits, none that others use; first come, first served."""

    async def main() -> None:
        live, order = LiveRequests(), list[str]()
        slots = LineSlots(live, lambda: 4, lambda: True)

        async def take(name: str, rows: int) -> None:
            await slots.acquire(rows)
            order.append(name)

        async def settle() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        waiting = live.arrive("bob", num_prompt=1, max_tokens=1, num_answers=3)
        tasks = [
            asyncio.ensure_future(take(name, rows)) for name, rows in (("a", 1), ("b", 9), ("c", 1))
        ]
        await settle()
        assert order == []
        live.withdraw(waiting)
        await settle()
        assert (order, slots.num_used) == (["a"], 1)  # b needs all of the share
        slots.release(1)
        await settle()
        assert (order, slots.num_used) == (["a", "b"], 2)
        tasks[2].cancel()
        await settle()
        slots.release(2)
        await settle()
        assert (order, slots.num_used) == (["a", "b"], 0)

    asyncio.run(main())
