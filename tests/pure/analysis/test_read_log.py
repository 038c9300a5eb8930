"""Files of logs become requests with the right lines; what cannot be read is counted by line."""

import bz2
import gzip
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from ramify.analysis.log_files import read_log
from ramify.analysis.reader import ReadQuality
from ramify.analysis.records import LoggedRequest
from ramify.errors import LogError


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "gpt-4o", "messages": [{"role": "user", "content": text}], **more}


def lines_of(*rows: Any) -> str:
    return "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


def read(path: Path | list[Path], **options: Any) -> tuple[list[LoggedRequest], ReadQuality]:
    quality = ReadQuality()
    return list(read_log(path, quality=quality, **options)), quality


def places(requests: list[LoggedRequest]) -> list[tuple[int, int | None]]:
    return [(request.line, request.index) for request in requests]


def test_bad_lines_are_reported_and_counted_as_lines(tmp_path: Path) -> None:
    """Blank, broken, binary and undecodable lines move no line number and stop nothing."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(
        b"garbage\n"
        + lines_of(chat("a"), "\n", '{"model": "gpt\n', chat("b")).encode()
        + b'{"model": "\xff\xfe"}\n\x00\x00\x00\n'
        + b"[" * 100_000
        + b"\n"
        + json.dumps(chat("c")).encode()
    )

    requests, quality = read(path)

    assert places(requests) == [(2, None), (5, None), (9, None)]
    assert [line for _, line in quality.bad_lines] == [1, 4, 6, 7, 8]
    assert quality.num_requests == 3
    assert quality.num_rows == 3


def test_strict_reading_ends_at_the_first_bad_line(tmp_path: Path) -> None:
    """A bad line is an error that names file and line if asked for."""
    path = tmp_path / "log.jsonl"
    path.write_text(lines_of(chat(), "{\n"))

    with pytest.raises(LogError, match=r"log\.jsonl, line 2"):
        read(path, strict=True)


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_elements_of_an_array_have_their_lines(tmp_path: Path, indent: int | None) -> None:
    """An element's line is where it begins; elements on one line have an index."""
    path = tmp_path / "log.json"
    rows = [chat("a"), chat("{[\"'\\"), chat("c")]
    text = json.dumps(rows, indent=indent)
    path.write_text(text)

    requests, quality = read(path)

    assert [request.segments[-1].text for request in requests] == ["a", "{[\"'\\", "c"]
    assert not quality.bad_lines
    if indent is None:
        assert places(requests) == [(1, 0), (1, 1), (1, 2)]
    elif indent == 2:
        assert [request.index for request in requests] == [None, None, None]
        assert len({request.line for request in requests}) == 3
        assert requests[0].line == 2


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_a_document_with_a_list_of_rows_is_read_row_by_row(
    tmp_path: Path, indent: int | None
) -> None:
    """Exports wrap rows as `{"data": […]}`; what stands around the list is no row."""
    path = tmp_path / "log.json"
    path.write_text(
        json.dumps(
            {"meta": {"page": [1]}, "data": [chat("a"), chat("b")], "next": None}, indent=indent
        )
    )

    requests, quality = read(path)

    assert [request.segments[-1].text for request in requests] == ["a", "b"]
    assert not quality.bad_lines
    assert sum(quality.skipped.values()) == 0


@pytest.mark.parametrize("end", ['{"model": "m",', '{"model":', '{"messages": [', "{", '{"a": [1,'])
def test_a_line_cut_where_a_document_could_go_on_loses_only_itself(
    tmp_path: Path, end: str
) -> None:
    """The next line is a value of its own, so the cut line is bad and no document begins."""
    path = tmp_path / "log.jsonl"
    path.write_text(lines_of(chat("a"), end + "\n", chat("b"), chat("c")))

    requests, quality = read(path)

    assert places(requests) == [(1, None), (3, None), (4, None)]
    assert [line for _, line in quality.bad_lines] == [2]


def test_values_that_share_a_line_are_numbered(tmp_path: Path) -> None:
    """Two arrays and an object on a line; a text among them is no prompt."""
    path = tmp_path / "log.json"
    a, b, c = (json.dumps(chat(text)) for text in "abc")
    path.write_text(f'[{a}] [{b}, "stray"]\n[{c}]')

    requests, quality = read(path)

    assert places(requests) == [(1, 0), (1, 1), (2, None)]
    assert quality.skipped["row of no known format"] == 1


def test_a_broken_document_is_one_bad_file(tmp_path: Path) -> None:
    """Elements before the one that is malformed are read; its line is told, once."""
    path = tmp_path / "log.json"
    rows = [json.dumps(chat(text), indent=1) for text in "abcd"]
    rows[1] = rows[1].replace('"gpt-4o"', '"gpt-4o')
    rows[2] = rows[2].replace('"model":', '"model"')
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n")

    requests, quality = read(path)

    assert [request.segments[-1].text for request in requests] == ["a"]
    height = rows[0].count("\n") + 1
    assert [line for _, line in quality.bad_lines] == [2 + height + 1]
    assert quality.bad_reasons == {"no JSON; the rest of the document is not read": 1}


def test_a_document_is_read_up_to_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    """Elements before them are read, also where they come with the first bytes of the file."""
    path = tmp_path / "log.json"
    rows = [json.dumps(chat(text), indent=1) for text in "abc"]
    whole = "[\n" + ",\n".join(rows) + "\n]\n"
    path.write_bytes(whole.encode().replace(b'"c"', b'"\xe9"'))

    requests, quality = read(path)

    assert [request.segments[-1].text for request in requests] == ["a", "b"]
    broken_at = whole[: whole.index('"c"')].count("\n") + 1
    assert [line for _, line in quality.bad_lines] == [broken_at]
    assert quality.bad_reasons == {"no UTF-8; the rest of the document is not read": 1}


@pytest.mark.parametrize(
    "end",
    [
        '{"model": "m",',
        '{"model":',
        '{"messages": [',
        "{",
        '{"a": [1,',
        '{"prompt": "\udcff"}',
        '{"prompt": "a',
    ],
)
def test_json_lines_may_begin_with_a_broken_line(tmp_path: Path, end: str) -> None:
    """A document could go on after it, but the next lines are values of their own."""
    path = tmp_path / "log.jsonl"
    text = lines_of(end + "\n", chat("b"), chat("c"))
    path.write_bytes(text.encode("utf-8", "surrogateescape"))

    requests, quality = read(path)

    assert places(requests) == [(2, None), (3, None)]
    assert [line for _, line in quality.bad_lines] == [1]


@pytest.mark.parametrize("start", ["[2026-05-01 10:00:00] ", "[gw0] ", "{1} "])
def test_lines_that_begin_with_a_bracket_are_no_document(tmp_path: Path, start: str) -> None:
    """Each line of a server's log that is no request is a bad line, and objects between them are rows."""
    path = tmp_path / "log"
    path.write_text(lines_of(f"{start}Receive\n", f"{start}Finish\n", chat("b"), f"{start}End\n"))

    requests, quality = read(path)

    assert places(requests) == [(3, None)]
    assert [line for _, line in quality.bad_lines] == [1, 2, 4]


def test_documents_may_follow_one_another(tmp_path: Path) -> None:
    """As `jq` prints JSON Lines: each value has the line on which it begins."""
    path = tmp_path / "log.json"
    rows = [json.dumps(chat(text), indent=2) for text in "ab"]
    path.write_text("\n".join(rows))

    requests, quality = read(path)

    assert places(requests) == [(1, None), (1 + rows[0].count("\n") + 1, None)]
    assert not quality.bad_lines


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        (".gz", gzip.compress),
        (".zst", zstandard.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
    ],
)
def test_compressed_files_are_read_and_cut_ones_up_to_the_cut(
    tmp_path: Path, suffix: str, compress: Any
) -> None:
    """Frames follow one another; a cut file gives what is whole, and the line of the cut."""
    whole, cut = tmp_path / f"a.jsonl{suffix}", tmp_path / f"b.jsonl{suffix}"
    text = lines_of(*(chat(f"{number} {number * 7919**9}") for number in range(5000))).encode()
    data = compress(text)
    whole.write_bytes(data + compress(lines_of(chat("last")).encode()))
    cut.write_bytes(data[: len(data) - 30])

    requests, quality = read(whole)
    before_cut, cut_quality = read(cut)

    assert len(requests) == 5001
    assert requests[-1].line == 5001
    assert not quality.bad_lines
    assert len(before_cut) < 5001
    assert [line for _, line in cut_quality.bad_lines] == [len(before_cut) + 1]


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"\x80\x04\x95", "pickle"),
        (b"SQLite format 3\x00", "SQLite"),
        (b"PK\x03\x04", "zip"),
    ],
)
def test_files_that_are_no_logs_are_refused(tmp_path: Path, head: bytes, reason: str) -> None:
    """The message says what the file is and what to do; nothing is executed."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(head + b"\x00" * 100)

    with pytest.raises(LogError, match=f"{reason}.*convert it"):
        read(path)


def test_missing_and_empty_inputs(tmp_path: Path) -> None:
    """A path that does not exist and a directory without logs are errors, an empty file is not."""
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()

    requests, quality = read(tmp_path / "empty.jsonl")

    assert (requests, quality.notes["empty file"]) == ([], 1)
    with pytest.raises(LogError, match="does not exist"):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(LogError, match="no file with a suffix of a log"):
        read(tmp_path / "folder")
    with pytest.raises(LogError, match=r"no log format 'x'; choose one of .*batches"):
        read(tmp_path / "empty.jsonl", format="x")


def test_directories_are_searched_for_logs(tmp_path: Path) -> None:
    """Files with the suffix of a log are read by name, others are left alone."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.jsonl.gz").write_bytes(gzip.compress(lines_of(chat("2")).encode()))
    (tmp_path / "a.jsonl").write_text(lines_of(chat("1")))
    (tmp_path / "c.pkl").write_bytes(b"\x80\x04")

    requests, _ = read(tmp_path)

    assert [request.segments[-1].text for request in requests] == ["1", "2"]


def test_standard_input_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` is read like any file, and named so."""
    path = tmp_path / "log"
    path.write_text(lines_of(chat("a")))

    with path.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        requests = list(read_log("-"))

    assert [(request.file, request.line) for request in requests] == [("-", 1)]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_byte_order_marks_and_line_ends_of_windows(tmp_path: Path, encoding: str) -> None:
    """A mark at the start, UTF-16 and CRLF change neither texts nor lines."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(lines_of(chat("é"), chat("b")).replace("\n", "\r\n").encode(encoding))

    requests, quality = read(path)

    assert [(item.line, item.segments[-1].text) for item in requests] == [(1, "é"), (2, "b")]
    assert not quality.bad_lines


def test_long_and_cut_files_in_utf16_are_read(tmp_path: Path) -> None:
    """Characters of several bytes at the end of a buffer are whole; a cut file is read up to the cut."""
    rows = json.dumps(chat("日本é" * 1000), ensure_ascii=False) + "\n"
    whole, cut = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    whole.write_bytes((rows * 300).encode("utf-16"))
    cut.write_bytes((rows * 10).encode("utf-16")[:-1])

    requests, quality = read(whole)
    before_cut, cut_quality = read(cut)

    assert len(requests) == 300
    assert not quality.bad_lines
    assert len(before_cut) == 10
    assert cut_quality.bad_reasons == {"file ends too early": 1}


def test_values_that_python_writes_are_read(tmp_path: Path) -> None:
    """NaN, lone surrogates and doubled keys are taken as Python's decoder takes them."""
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}], "x": NaN}\n'
        '{"model": "m", "messages": [], "messages": [{"role": "user", "content": "b"}]}\n'
    )

    requests, _ = read(path)

    assert [request.segments[-1].text for request in requests] == ["\ud800", "b"]


def test_tables_have_the_line_on_which_a_row_begins(tmp_path: Path) -> None:
    """Cells may hold line ends, and bodies as JSON."""
    path = tmp_path / "log.csv"
    body = json.dumps(chat("a"), indent=1).replace('"', '""')
    path.write_text(f'request_body,session_id\n"{body}",s\nonly one\n"{body}",t\n')
    height = body.count("\n") + 1

    requests, quality = read(path)

    assert places(requests) == [(2, None), (3 + height, None)]
    assert [request.conversation for request in requests] == ["s", "t"]
    assert [line for _, line in quality.bad_lines] == [2 + height]


def test_a_missing_quote_loses_only_its_row(tmp_path: Path) -> None:
    """The lines after a row whose cell does not end are read again as rows."""
    path = tmp_path / "log.csv"
    good = '"{""prompt"": ""a""}",s\n'
    path.write_text(
        "request_body,session_id\n" + good + '"open,s\n' + good * 3 + '"open,s\n' + good
    )

    requests, quality = read(path)

    assert [request.line for request in requests] == [2, 4, 5, 6, 8]
    assert [line for _, line in quality.bad_lines] == [3, 7]


def test_progress_counts_the_bytes_on_disk(tmp_path: Path) -> None:
    """The last call has all bytes of all files."""
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress(lines_of(chat()).encode()))
    calls: list[tuple[int, int | None]] = []

    list(read_log([path, path], progress=lambda done, total: calls.append((done, total))))

    size = path.stat().st_size
    assert calls[-1] == (2 * size, 2 * size)


def test_failed_attempts_are_no_requests(tmp_path: Path) -> None:
    """An error status or body, alone or beside a retry that succeeds, is counted and skipped."""
    path = tmp_path / "log.jsonl"
    answer = {"id": "r", "usage": {"prompt_tokens": 3}}
    path.write_text(
        lines_of(
            {"request": chat(), "response": {"error": {"message": "overloaded"}}},
            {"request": chat(), "status_code": 529},
            {"request": chat(), "response": {"status_code": 500, "body": {}}},
            {"request": chat(), "error": "timeout", "response": None},
            {"request": chat(), "response": answer, "status": 200},
        )
    )

    requests, quality = read(path)

    assert places(requests) == [(5, None)]
    assert quality.skipped["failed attempt"] == 4
    assert requests[0].usage.num_input == 3
    assert requests[0].usage.num_read is None


def test_times_and_conversation_stand_beside_a_body(tmp_path: Path) -> None:
    """Start, duration, first output, conversation and tenant are read from sibling keys."""
    path = tmp_path / "log.jsonl"
    path.write_text(
        lines_of(
            {
                "request": {"url": "https://api.openai.com/v1/chat/completions", "body": chat()},
                "timestamp": "2026-11-25T00:00:01Z",
                "latency_ms": 1500,
                "ttft_ms": 250,
                "session_id": "s",
                "tenant": "t",
            }
        )
    )

    (request,), _ = read(path)

    assert request.start_s is not None
    assert request.end_s == request.start_s + 1.5
    assert request.first_output_s == request.start_s + 0.25
    assert (request.conversation, request.cache_scope) == ("s", "tenant=t")
    assert request.provider == "openai"


def test_histories_are_joined_by_the_response_that_they_continue(tmp_path: Path) -> None:
    """`previous_response_id` puts the earlier input and answer before the new items."""
    path = tmp_path / "log.jsonl"

    def answer(number: int) -> dict[str, Any]:
        item = {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": f"answer {number}"}],
        }
        return {"id": f"resp_{number}", "object": "response", "output": [item], "usage": {}}

    def body(text: str, **more: Any) -> dict[str, Any]:
        return {"model": "gpt-5.6", "input": text, **more}

    path.write_text(
        lines_of(
            {"request": body("a"), "response": answer(1)},
            {"request": body("b", previous_response_id="resp_1"), "response": answer(2)},
            {"request": body("c", previous_response_id="resp_2"), "response": answer(3)},
            {"request": body("d", previous_response_id="resp_x"), "response": answer(4)},
        )
    )

    requests, quality = read(path)

    assert [(item.path, item.text) for item in requests[2].segments[1:]] == [
        ("messages[0]", "a"),
        ("messages[1].content[0]", "answer 1"),
        ("messages[2]", "b"),
        ("messages[3].content[0]", "answer 2"),
        ("messages[4]", "c"),
    ]
    assert [request.has_full_text for request in requests] == [True, True, True, False]
    assert quality.notes["history is not in the log"] == 1
