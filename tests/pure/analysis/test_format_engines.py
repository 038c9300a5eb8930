"""Request logs of vLLM and SGLang."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.analysis.reader import BadRowError
from ramify.analysis.readers.engines.python_literals import integers_at, string_at
from ramify.analysis.readers.engines.sglang import SGLANG
from ramify.analysis.readers.engines.vllm import VLLM
from ramify.analysis.records import TextForm
from tests.pure.analysis.log_rows import read_rows

OLD = (
    "INFO 07-10 11:22:33 async_llm_engine.py:174] Received request cmpl-1: prompt: 'It\\'s \"late\", "
    "she said.\\nWhy?', sampling_params: SamplingParams(n=1, temperature=0.7, stop=[]), "
    "prompt_token_ids: [1, 450, 29871], lora_request: None."
)
MIDDLE = (
    'INFO 11-20 08:15:00 [logger.py:42] Received request chatcmpl-2: prompt: "It\'s late", params: '
    "SamplingParams(n=1), prompt_token_ids: None, prompt_embeds shape: None, lora_request: "
    "LoRARequest(lora_name='sql', lora_int_id=1, lora_path='/adapters/sql')."
)
DETAILS = (
    "(APIServer pid=7) DEBUG 11-20 08:15:01 [logger.py:47] Request chatcmpl-3 details: prompt: None, "
    "prompt_token_ids: [9, 8, 7], prompt_embeds shape: None."
)
RECEIVED = (
    "(APIServer pid=7) INFO 11-20 08:15:01 [logger.py:56] Received request chatcmpl-3: params: "
    "SamplingParams(n=1, temperature=0.0), lora_request: None."
)
BARE = RECEIVED.replace("chatcmpl-3", "chatcmpl-4")


def test_prompts_of_all_versions_are_read() -> None:
    """The INFO line of old versions, the DEBUG line of new ones; the adapter is the scope."""
    requests, quality = read_rows(
        VLLM, [OLD, "INFO 07-10 11:22:34 metrics.py:295] Avg prompt throughput", MIDDLE, DETAILS, RECEIVED]
    )  # fmt: skip

    assert [(request.line, request.request_id) for request in requests] == [
        (1, "cmpl-1"),
        (3, "chatcmpl-2"),
        (4, "chatcmpl-3"),
    ]
    assert [request.segments[0].text for request in requests] == [
        'It\'s "late", she said.\nWhy?',
        "It's late",
        "9 8 7",
    ]
    assert requests[2].segments[0].form is TextForm.TOKENS
    assert requests[0].usage.num_input == 3
    assert requests[1].cache_scope == "lora_name=sql"
    assert quality.skipped["line without a request"] == 1
    assert not quality.bad_lines


def test_times_without_a_year_count_from_the_first_line() -> None:
    """Seconds since the log's start, over a change of the month as well."""
    lines = [OLD, OLD.replace("07-10 11:22:33", "07-10 11:23:33"), OLD.replace("07-10", "08-01")]

    requests, _ = read_rows(VLLM, lines)

    assert [request.start_s for request in requests] == [0.0, 60.0, 22 * 86400.0]


def test_a_log_without_prompts_says_which_level_has_them() -> None:
    """Newer versions log no prompts at INFO: no request, and a note with the way out."""
    requests, quality = read_rows(VLLM, [BARE, BARE.replace("-4", "-5")])

    assert not requests
    assert quality.skipped["request without a prompt"] == 2
    [(note, times)] = quality.notes.items()
    assert "VLLM_LOGGING_LEVEL=DEBUG" in note and times == 2


def test_a_cut_prompt_has_no_full_text() -> None:
    """The server's own options tell the limit; without them, as many characters as ids do."""
    arguments = (
        "INFO 11-20 08:00:00 [utils.py:253] non-default args: {'max_log_len': 9, 'port': 8000}"
    )
    both = DETAILS.replace("prompt: None", "prompt: 'abcdefgh'").replace(
        "[9, 8, 7]", "[1, 2, 3, 4, 5, 6, 7, 8]"
    )

    (by_option, whole), quality = read_rows(
        VLLM, [arguments, MIDDLE, MIDDLE.replace("It's late", "short")]
    )
    [by_lengths], _ = read_rows(VLLM, [both])

    assert (by_option.has_full_text, whole.has_full_text) == (False, True)
    assert not by_lengths.has_full_text
    assert quality.notes["prompt cut by --max-log-len"] == 1


def test_a_line_that_ends_in_its_prompt_is_told() -> None:
    """A torn line is bad, with its number; the next is read."""
    requests, quality = read_rows(VLLM, [OLD[:95], DETAILS[:120], MIDDLE])

    assert quality.bad_lines == [("log.jsonl", 1), ("log.jsonl", 2)]
    assert [request.line for request in requests] == [3]


def test_json_lines_of_a_logging_configuration_are_read() -> None:
    """The message is in `message`, the time beside it."""
    row = {"timestamp": "2026-05-01T10:00:00Z", "level": "INFO", "message": MIDDLE}

    [request], _ = read_rows(VLLM, [row])

    assert VLLM.is_row(row)
    assert request.start_s == 1777629600.0


@given(st.text(max_size=60), st.lists(st.integers(0, 1 << 40), max_size=8))
def test_what_python_writes_is_read_back(text: str, ids: list[int]) -> None:
    """`repr` of every string and list of ids."""
    line = f"{text!r}, {ids!r}"

    value, end = string_at(line, 0)

    assert value == text
    assert integers_at(line, end + 2) == (ids, len(line))


@given(st.data())
def test_torn_and_mutated_lines_raise_nothing_else(data: st.DataObject) -> None:
    """Any cut or changed character: read, skipped or bad."""
    lines = [OLD, MIDDLE, DETAILS, RECEIVED]
    line = data.draw(st.sampled_from(lines))
    begin = data.draw(st.integers(0, len(line)))
    end = data.draw(st.integers(begin, len(line)))
    mutated = line[:begin] + data.draw(st.text(max_size=3)) + line[end:]

    read_rows(VLLM, [*lines, mutated])


def event(kind: str, rid: Any, time: str, obj: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A row of SGLang's request log."""
    return {"timestamp": time, "event": f"request.{kind}", "rid": rid, "obj": obj, **fields}


META = {
    "id": "r1",
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "cached_tokens": 4,
    "e2e_latency": 0.5,
}


def test_received_and_finished_are_one_request() -> None:
    """Start and line of the first, end and counts of the second."""
    rows = [
        event("received", "r1", "2026-05-01T10:00:00", {"text": "What?", "extra_key": "t1"}),
        event("received", "r2", "2026-05-01T10:00:01", {"text": None, "input_ids": [1, 2, 3]}),
        event("finished", "r1", "2026-05-01T10:00:02", {"text": "What?", "extra_key": "t1"},
              out={"text": "Why?", "meta_info": META}),
    ]  # fmt: skip

    (first, second), _ = read_rows(SGLANG, rows)

    assert all(SGLANG.is_row(row) for row in rows)
    assert (first.line, first.request_id, first.segments[0].text) == (1, "r1", "What?")
    assert (first.start_s, first.end_s) == (1777629600.0, 1777629602.0)
    assert (first.usage.num_input, first.usage.num_read, first.usage.num_output) == (7, 4, 3)
    assert first.cache_scope == "extra_key=t1"
    assert (second.line, second.segments[0].text, second.end_s) == (2, "1 2 3", None)
    assert second.usage.num_read is None


def test_the_start_follows_from_the_latency() -> None:
    """A log of finished requests only."""
    [request], _ = read_rows(
        SGLANG,
        [event("finished", "r1", "2026-05-01T10:00:02", {"text": "W"}, out={"meta_info": META})],
    )

    assert request.start_s == 1777629601.5


def test_a_text_spliced_in_the_middle_is_cut() -> None:
    """2,048 characters and the dots at half; dots elsewhere are text."""
    cut = "a" * 1024 + "..." + "b" * 1024
    texts = [cut, "Wait... what?", "a" * 1000 + "..." + "b" * 1048]
    rows = [
        event("finished", f"r{text[:2]}", "2026-05-01T10:00:02", {"text": text}) for text in texts
    ]
    ids = event("finished", "i", "2026-05-01T10:00:02", {"input_ids": [1, 2, "...", 8, 9]})

    requests, quality = read_rows(SGLANG, [*rows, ids])

    assert [request.has_full_text for request in requests] == [False, True, True, False]
    assert quality.notes["prompt cut by --log-requests-level 2; level 3 logs all of it"] == 2


def test_lower_levels_have_counts_and_no_prompt() -> None:
    """A note names the level that has prompts; usage is kept."""
    [request], quality = read_rows(
        SGLANG, [event("finished", "r1", "2026-05-01T10:00:02", {}, out={"meta_info": META})]
    )

    assert not request.segments and not request.has_full_text
    assert request.usage.num_read == 4
    assert (
        quality.notes["requests without text and token ids: log with --log-requests-level 3"] == 1
    )


def test_a_batch_is_several_requests_of_a_line() -> None:
    """Texts, ids and outputs in order."""
    obj = {"text": ["a", "b"]}
    rows = [
        event("received", ["r1", "r2"], "2026-05-01T10:00:00", obj),
        event("finished", ["r1", "r2"], "2026-05-01T10:00:02", obj,
              out=[{"meta_info": META}, {"meta_info": META | {"prompt_tokens": 9}}]),
    ]  # fmt: skip

    requests, _ = read_rows(SGLANG, rows)

    assert [
        (item.line, item.index, item.request_id, item.usage.num_input) for item in requests
    ] == [
        (1, 0, "r1", 7),
        (1, 1, "r2", 9),
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"event": "request.finished", "rid": 5, "obj": "none"},
        {"event": "request.finished", "rid": "r", "obj": {"text": 7}},
        {"event": "request.finished", "rid": "r", "obj": {"input_ids": [1.5]}},
        {"event": "request.finished", "rid": "r", "obj": {"input_ids": {}}},
        {"event": "request.finished", "rid": "r", "obj": {}, "timestamp": "noon"},
        "text",
    ],
)
def test_bad_events_are_bad_rows(row: Any) -> None:
    """Whatever is wrong is told as a bad row."""
    _, quality = read_rows(SGLANG, [row])

    assert quality.bad_lines == [("log.jsonl", 1)]


def test_unknown_escapes_and_open_strings_are_bad() -> None:
    """Nothing is guessed."""
    for text in (r"'\q'", "'open", "open'", r"'\U00110000'"):
        with pytest.raises(BadRowError):
            string_at(text, 0)


RECEIVE = (
    "[2026-05-01 10:00:00] Receive: obj=GenerateReqInput(rid='r1', http_worker_ipc=None, "
    "text='It\\'s (late), text=why?', input_ids=None, image_data=None, sampling_params={'n': 1, "
    "'stop': ['rid=']}, extra_key='t1', lora_path=None)"
)
FINISH = (
    RECEIVE.replace("Receive", "Finish").replace("10:00:00", "10:00:02")
    + ", out={'text': \"'meta_info': {'prompt_tokens': 1\", 'meta_info': {'id': 'r1', "
    "'finish_reason': {'type': 'stop'}, 'prompt_tokens': 7, 'completion_tokens': 3, "
    "'cached_tokens': 4, 'e2e_latency': 1.5}}"
)


def test_lines_of_text_are_the_same_events() -> None:
    """SGLang's default form, with quotes, brackets and names of fields inside the prompt."""
    [request], quality = read_rows(SGLANG, [RECEIVE, FINISH])

    assert all(map(SGLANG.is_row, (RECEIVE, FINISH)))
    assert (request.line, request.request_id) == (1, "r1")
    assert request.segments[0].text == "It's (late), text=why?"
    assert (request.start_s, request.end_s) == (1777629600.0, 1777629602.0)
    assert (request.usage.num_input, request.usage.num_read, request.usage.num_output) == (7, 4, 3)
    assert request.cache_scope == "extra_key=t1"
    assert not quality.bad_lines


def test_cut_texts_and_ids_of_lines_are_noticed() -> None:
    """Both halves with dots between them."""
    text = RECEIVE.replace("text='It\\'s (late), text=why?'", f"text={'a' * 64!r} ... {'b' * 64!r}")
    ids = RECEIVE.replace(
        "text='It\\'s (late), text=why?', input_ids=None", "input_ids=[1] ... [9]"
    )
    batch = RECEIVE.replace("rid='r1'", "rid=['r1', 'r2']").replace(
        "text='It\\'s (late), text=why?'", "text=['one', 'two']"
    )

    (first, second, *several), quality = read_rows(SGLANG, [text, ids.replace("r1", "r3"), batch])

    assert (first.has_full_text, first.segments[0].text) == (False, "a" * 64 + "..." + "b" * 64)
    assert (second.has_full_text, second.segments[0].text) == (False, "1 9")
    assert [(item.index, item.request_id, item.segments[0].text) for item in several] == [
        (0, "r1", "one"),
        (1, "r2", "two"),
    ]
    assert not quality.bad_lines


@given(st.data())
def test_torn_lines_of_sglang_raise_nothing_else(data: st.DataObject) -> None:
    """Any cut or changed character: read or bad."""
    line = data.draw(st.sampled_from([RECEIVE, FINISH]))
    begin = data.draw(st.integers(0, len(line)))
    end = data.draw(st.integers(begin, len(line)))

    read_rows(SGLANG, [RECEIVE, line[:begin] + data.draw(st.text(max_size=3)) + line[end:]])
