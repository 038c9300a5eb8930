"""Request fields of vLLM and of lenient clients: what each does to the answer, or its 400."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.text.tokenizer import Tokenizer
from tests.budget import examples
from tests.pure.server_bench import TINY, Answer, ServerBench, ask, chat, run

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENIZER = Tokenizer.load(TINY)
TEXT = "Mara has four lamps"


def completion(text: str | list[int] = TEXT, **others: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": 12} | others


def text_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    choice = answer.json["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def test_a_bad_word_is_not_written() -> None:
    """The tokens of the word, with a space before it or not, do not follow each other."""
    text = " in the attic, the in"
    free = text_of(ask(COMPLETIONS, completion(), next_text=text))
    body = completion(bad_words=["the"], return_token_ids=True, max_tokens=200)
    banned = ask(COMPLETIONS, body, next_text=text).json["choices"][0]["token_ids"]

    assert " the " in free
    for word in ("the", " the"):
        ids = TOKENIZER.encode(word, add_special_tokens=False).tolist()
        starts = range(len(banned) - len(ids) + 1)
        assert not any(banned[start : start + len(ids)] == ids for start in starts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("included", "text"), [(True, " in the"), (False, " in "), (None, " in ")])
def test_the_stop_string_is_included_on_request(
    included: bool | None, text: str, stream: bool
) -> None:
    """`include_stop_str_in_output`: the text ends with the stop string."""
    body = completion(stop=["the"], include_stop_str_in_output=included, stream=stream)

    answer = ask(COMPLETIONS, body, next_text=" in the attic")

    if stream:
        assert "".join(event["choices"][0]["text"] for event in answer.events) == text
    else:
        assert text_of(answer) == text


def test_logprobs_of_the_prompt_have_the_form_of_vllm() -> None:
    """By token id: logprob, rank and text; None for the first token. Chat has them at the top."""
    completed = ask(COMPLETIONS, completion([5, 6, 7, 8], prompt_logprobs=1, n=2)).json
    chatted = ask(CHAT, chat("Hi", prompt_logprobs=0)).json

    for choice in completed["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert [str(token) in entry for token, entry in zip((6, 7, 8), others, strict=True)]
        for entry in others:
            assert all(
                value.keys() == {"logprob", "rank", "decoded_token"} for value in entry.values()
            )
            assert 1 <= len(entry) <= 2
    assert len(chatted["prompt_logprobs"]) == chatted["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in chatted["prompt_logprobs"][1:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_token_ids_are_returned(path: str, stream: bool) -> None:
    """The ids of prompt and answer; those of a stream's chunks add up, whatever text is held back."""
    body = completion() if path == COMPLETIONS else chat("Hi", max_tokens=12)
    body |= {"return_token_ids": True, "stream": stream, "n": 2, "stop": ["zzz"], "seed": 1}

    answer = ask(path, body, next_text=" in the attic")

    payloads = answer.events if stream else [answer.json]
    prompts = [
        item["prompt_token_ids"]
        for payload in payloads
        for item in (payload, *payload["choices"])
        if "prompt_token_ids" in item
    ]
    expected = TOKENIZER.encode(" in the attic", add_special_tokens=False).tolist()
    assert len(prompts) == (1 if path == CHAT else 2)
    assert prompts[0][-1] in TOKENIZER.encode(TEXT + "<|assistant|>", False)
    for index in range(2):
        ids: list[int] = []
        for payload in payloads:
            ids += [t for c in payload["choices"] if c["index"] == index for t in c["token_ids"]]
        assert ids[: len(expected)] == expected
        assert ids[len(expected) :] == [TOKENIZER.eos_token_ids[0]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_tokens_in_logprobs_are_named_by_id_on_request(path: str) -> None:
    """`return_tokens_as_token_ids`: `token_id:N` in place of the text, of the likeliest ones too."""
    body = (
        completion(logprobs=1) if path == COMPLETIONS else chat("Hi", logprobs=True, top_logprobs=1)
    )

    answer = ask(path, body | {"return_tokens_as_token_ids": True}).json

    logprobs = answer["choices"][0]["logprobs"]
    if path == COMPLETIONS:
        names = [*logprobs["tokens"], *(name for top in logprobs["top_logprobs"] for name in top)]
    else:
        names = [entry["token"] for entry in logprobs["content"]]
        names += [top["token"] for entry in logprobs["content"] for top in entry["top_logprobs"]]
    assert names
    assert all(name.startswith("token_id:") for name in names)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_echoes_the_text_that_it_continues(stream: bool) -> None:
    """`echo`: the content begins with the last message, if that is the assistant's."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    body = {"messages": messages, "max_tokens": 12, "continue_final_message": True}

    answer = ask(CHAT, body | {"echo": True, "stream": stream}, next_text=" in the attic")
    plain = ask(CHAT, chat("Hi", echo=True), next_text=" in")

    if stream:
        deltas = [event["choices"][0]["delta"] for event in answer.events]
        assert "".join(delta.get("content", "") for delta in deltas) == "Well, in the attic"
    else:
        assert text_of(answer) == "Well, in the attic"
    assert text_of(plain) == " in"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("limit", "expected"), [(3, 3), (-1, 5), (5000, 5)])
def test_a_prompt_is_truncated_to_its_last_tokens(path: str, limit: int, expected: int) -> None:
    """`truncate_prompt_tokens` keeps the end; -1 keeps what fits."""
    body = completion([5, 6, 7, 8, 9]) if path == COMPLETIONS else chat("x")
    whole = ask(path, body | {"return_token_ids": True}).json

    answer = ask(path, body | {"return_token_ids": True, "truncate_prompt_tokens": limit}).json

    field = answer if path == CHAT else answer["choices"][0]
    ids = (whole if path == CHAT else whole["choices"][0])["prompt_token_ids"]
    assert field["prompt_token_ids"] == ids[-expected:] if limit == 3 else ids
    assert answer["usage"]["prompt_tokens"] == min(len(ids), expected if limit == 3 else len(ids))


def test_an_overlong_prompt_is_truncated_to_leave_room() -> None:
    """-1: the prompt's end and the answer fill the context."""
    body = {"prompt": [5] * 3000, "max_tokens": 8, "truncate_prompt_tokens": -1}

    answer = ask(COMPLETIONS, body).json

    assert answer["usage"]["prompt_tokens"] == 2048 - 8


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.sampled_from(["Hi", " x ", "", "<|end|>", "é\n"]), min_size=1, max_size=4),
    st.sampled_from([{}, {"add_generation_prompt": False}, {"continue_final_message": True}]),
    st.sampled_from([{}, {"chat_template_kwargs": {"a": 1}}, {"tool_choice": "none"}]),
    st.sampled_from([{}, {"truncate_prompt_tokens": 4}]),
)
def test_tokenize_returns_the_prompt_that_would_run(
    texts: list[str], turn: dict[str, Any], template: dict[str, Any], length: dict[str, Any]
) -> None:
    """The same fields sent to /tokenize and to the chat give the same token ids."""
    roles = ["user", "assistant"] * 2
    body: dict[str, Any] = {
        "messages": [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
        ],
        "max_tokens": 1,
        "return_token_ids": True,
    }
    body |= turn | template | length
    bench = ServerBench()

    async def main() -> tuple[Answer, Answer]:
        async with bench.running():
            return await bench.post("/tokenize", body), await bench.post(CHAT, body)

    tokenized, answered = run(main())

    assert tokenized.status == answered.status == 200, (tokenized.body, answered.body)
    assert tokenized.json["tokens"] == answered.json["prompt_token_ids"]
    assert bench.ended[0].request.prompt.ids.tolist() == tokenized.json["tokens"]


REFUSED = [
    ("use_beam_search", True, False),
    ("length_penalty", 0.5, 1.0),
    ("logits_processors", ["x"], []),
    ("early_stopping", True, False),
    ("stop_sequences", ["x"], []),
    ("max_new_tokens", 5, None),
    ("repeat_penalty", 1.1, 1),
    ("watermark", True, False),
]


@pytest.mark.parametrize(("name", "value", "neutral"), REFUSED)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_would_change_the_answer_is_refused(
    path: str, name: str, value: object, neutral: object
) -> None:
    """400 that names the field; its neutral value and null pass without a warning."""
    body = completion() if path == COMPLETIONS else chat("Hi")

    refused = ask(path, body | {name: value})
    passed = [ask(path, body | {name: same}) for same in (neutral, None)]

    explained = ask("/v1/cache/explain", body | {name: value})

    assert explained.status == refused.status == 400
    assert refused.json["error"]["param"] == name
    assert name in refused.json["error"]["message"]
    assert [answer.status for answer in passed] == [200, 200]
    assert not any("x-ramify-warning" in answer.headers for answer in passed)


def test_unknown_fields_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """In the answer's header, and once in the log."""
    bench = ServerBench()

    async def main() -> list[Answer]:
        async with bench.running():
            body = chat("Hi", frobnicate=1, **{"a\r\nb": [[]]})
            return [await bench.post(CHAT, body) for _ in range(2)]

    answers = run(main())

    for answer in answers:
        assert answer.status == 200
        assert (
            answer.headers["x-ramify-warning"] == "unknown fields are ignored: frobnicate, a\\r\\nb"
        )
    assert caplog.text.count("frobnicate") == 1


def test_many_unknown_fields_are_not_all_named() -> None:
    """The header has twenty and the number of the others; the log has these, and a thousand in all."""
    bench = ServerBench()
    body = chat("Hi", **{f"f{number}": 0 for number in range(3000)})

    async def main() -> Answer:
        async with bench.running():
            return await bench.post(CHAT, body)

    answer = run(main())

    assert answer.status == 200
    assert answer.headers["x-ramify-warning"].endswith("f19 and 2980 more")
    log = bench.service.unknown_fields
    assert len(log._names) == 20
    for number in range(60):
        log.report([f"f{number * 20 + index}" for index in range(20)], CHAT)
    assert len(log._names) == 1000


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("skip", "text"), [(None, " in the"), (True, " in the"), (False, " in<|pad|> the")]
)
def test_special_tokens_stay_in_the_text_on_request(
    path: str, skip: bool | None, text: str
) -> None:
    """`skip_special_tokens: false`: what the model wrote, without the token that ended it."""
    body = completion() if path == COMPLETIONS else chat("Hi", max_tokens=12)
    bench = ServerBench()
    script = [*TOKENIZER.encode(" in", False), 0, *TOKENIZER.encode(" the", False), 2]
    num_prompt: list[int] = []

    def next_token(context: Any) -> int:
        num_prompt[:] = num_prompt or [len(context)]
        return int(script[min(len(context) - num_prompt[0], len(script) - 1)])

    bench.device.next_token = next_token

    async def main() -> Answer:
        async with bench.running():
            return await bench.post(path, body | {"skip_special_tokens": skip})

    assert text_of(run(main())) == text
