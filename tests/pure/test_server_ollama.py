"""Ollama's API: the same prompts as OpenAI's, its streams, options, contexts and errors."""

import asyncio
import json
from datetime import datetime
from typing import Any

import httpx2 as httpx
import pytest

from ramify.models.configs.sampling_defaults import SamplingDefaults
from ramify.server.ollama.options import OLLAMA_DEFAULTS
from ramify.server.tenants import ApiKeys
from tests.pure.golden_chat import CALL_TEXT, FIND, LONG, SCHEMA, THOUGHT_TEXT, TWO_CALLS
from tests.pure.golden_recorder import Script
from tests.pure.live_server import live
from tests.pure.server_bench import TOOL_TEMPLATE, Answer, ServerBench, ask, chat, gated, run

CHAT, GENERATE = "/api/chat", "/api/generate"
WARNING = "x-ramify-warning"
QUESTION = {"role": "user", "content": "Who lives in Rome?"}
CALL = {"function": {"name": "find", "arguments": {"city": "Rome"}}}


def body(*messages: Any, options: Any = None, **fields: Any) -> dict[str, Any]:
    """A chat request for four tokens that is answered whole."""
    talk = list(messages) or [QUESTION]
    chosen = {"num_predict": 4, "temperature": 0} | (options or {})
    return {"model": "tiny", "messages": talk, "stream": False, "options": chosen} | fields


def question(prompt: str = "Who lives in Rome?", **fields: Any) -> dict[str, Any]:
    """The same for /api/generate."""
    options = {"num_predict": 4, "temperature": 0}
    return {"model": "tiny", "prompt": prompt, "stream": False, "options": options} | fields


def lines(answer: Answer) -> list[Any]:
    """The values of a stream."""
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.splitlines()]


def prompt_of(path: str, request: Any, **options: Any) -> list[int]:
    """The token ids of a request's prompt."""
    bench = ServerBench(**options)

    async def main() -> list[int]:
        async with bench.running():
            answer = await bench.post(path, request)
            assert answer.status == 200, answer.body
        return bench.ended[-1].request.prompt.ids.tolist()

    return run(main())


TALKS: dict[str, tuple[list[Any], list[Any]]] = {
    "system": ([{"role": "system", "content": "Be brief."}, QUESTION],) * 2,
    "turns": ([QUESTION, {"role": "assistant", "content": "Ann"}, QUESTION],) * 2,
    "no text": ([{"role": "user", "content": ""}, QUESTION],) * 2,
    "a call and its result": (
        [
            QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "Ann", "tool_name": "find"},
        ],
        [
            QUESTION,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"function": {"name": "find", "arguments": '{"city": "Rome"}'}, "id": ""}
                ],
            },
            {"role": "tool", "content": "Ann", "name": "find"},
        ],
    ),
    "thoughts": (
        [QUESTION, {"role": "assistant", "content": "Ann", "thinking": "Hm."}, QUESTION],
        [QUESTION, {"role": "assistant", "content": "Ann", "reasoning_content": "Hm."}, QUESTION],
    ),
}


@pytest.mark.parametrize("tools", [[], [FIND]], ids=["", "tools"])
@pytest.mark.parametrize("name", TALKS)
def test_a_prompt_has_the_tokens_of_openais_api(name: str, tools: list[Any]) -> None:
    """Messages, calls, results, thoughts and tools."""
    ours, openais = TALKS[name]
    options = {"chat_template": TOOL_TEMPLATE}

    ids = prompt_of(CHAT, body(*ours, tools=tools), **options)

    other = {"messages": openais, "tools": tools, "max_tokens": 4}
    assert ids == prompt_of("/v1/chat/completions", other, **options)


def test_what_either_api_computed_the_other_reads() -> None:
    """A prefix is found whichever way it came, and the answer says so beside Ollama's counts."""
    bench = ServerBench()
    talk = [{"role": "system", "content": LONG}, QUESTION]

    async def main() -> tuple[Answer, Answer]:
        async with bench.running():
            await bench.post("/v1/chat/completions", chat("x", messages=talk))
            first = await bench.post(CHAT, body(*talk))
            return first, await bench.post(GENERATE, question(system=LONG))

    for answer in run(main()):
        cache = answer.json["ramify_cache"]
        assert cache["read"] >= 32
        assert answer.json["prompt_eval_count"] == cache["read"] + cache["computed"]
        assert answer.headers["x-cache"].startswith(f"HIT; read={cache['read']}; ")


def test_a_stream_is_lines_that_end_with_counts_and_times() -> None:
    """By default; joined, they are the whole answer."""
    whole = ask(CHAT, body()).json
    streamed = lines(ask(CHAT, body() | {"stream": None}))

    text = "".join(line["message"]["content"] for line in streamed)
    assert text == whole["message"]["content"] != ""
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1]["message"] == {"role": "assistant", "content": ""}
    for last in (whole, streamed[-1]):
        assert last["done_reason"] == "length"
        assert (last["prompt_eval_count"], last["eval_count"]) == (whole["prompt_eval_count"], 4)
        parts = ("load_duration", "prompt_eval_duration", "eval_duration")
        assert all(type(last[name]) is int and last[name] > 0 for name in parts)
        assert sum(last[name] for name in parts) <= last["total_duration"] + 3
        assert datetime.fromisoformat(last["created_at"]).tzinfo is not None


def test_calls_come_whole() -> None:
    """Each in a line of its own, with an object as arguments; text and thoughts before it apart."""
    options = {"next_text": THOUGHT_TEXT, "chat_template": TOOL_TEMPLATE}
    request = body(options={"num_predict": 200}, tools=[FIND])

    message = ask(CHAT, request, **options).json["message"]
    streamed = lines(ask(CHAT, request | {"stream": True}, **options))

    assert (message["thinking"], message["content"]) == ("Hm.", "Look.")
    [call] = message["tool_calls"]
    assert call["function"] == {"index": 0, "name": "find", "arguments": {"city": "Rome"}}
    assert call["id"].startswith("call_")
    pieces = [line["message"] for line in streamed]
    assert "".join(piece.get("thinking", "") for piece in pieces) == "Hm."
    assert "".join(piece["content"] for piece in pieces) == "Look."
    [with_call] = [piece for piece in pieces if "tool_calls" in piece]
    assert with_call["tool_calls"][0]["function"] == call["function"]
    assert streamed[-1]["done_reason"] == "stop"


def test_a_call_that_is_cut_off_is_left_out() -> None:
    """Its arguments would be those of another call."""
    options = {"next_text": CALL_TEXT, "chat_template": TOOL_TEMPLATE}

    for num in (10, 20, 30):
        answer = ask(CHAT, body(options={"num_predict": num}, tools=[FIND]), **options).json
        calls = answer["message"].get("tool_calls", [])
        assert [call["function"]["arguments"] for call in calls] in ([], [{"city": "Rome"}])
        if not calls:
            assert answer["done_reason"] == "length"


def test_two_calls_are_numbered() -> None:
    """In the order in which the model writes them."""
    now = {"type": "function", "function": {"name": "now"}}
    options = {"next_text": TWO_CALLS, "chat_template": TOOL_TEMPLATE}

    answer = ask(CHAT, body(options={"num_predict": 200}, tools=[FIND, now]), **options).json

    functions = [call["function"] for call in answer["message"]["tool_calls"]]
    assert [(function["index"], function["name"]) for function in functions] == [
        (0, "find"),
        (1, "now"),
    ]


@pytest.mark.parametrize("format_", ["json", SCHEMA])
def test_an_answer_follows_its_format(format_: Any) -> None:
    """JSON of any kind, or of a schema."""
    request = question(format=format_, options={"num_predict": 400, "seed": 3})

    answer = ask(GENERATE, request).json

    value = json.loads(answer["response"]) if answer["done_reason"] == "stop" else None
    assert value is None or isinstance(value, dict)
    if value is not None and format_ is SCHEMA:
        assert value["city"] is not None


def test_options_reach_the_engine() -> None:
    """Under our names; null and integral floats are accepted."""
    bench = ServerBench()
    options = {
        "temperature": 0.5,
        "top_k": 7.0,
        "top_p": 0.75,
        "min_p": 0.25,
        "seed": 11,
        "num_predict": 3,
        "stop": ["zz", ""],
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 1,
        "num_ctx": 512,
        "num_keep": None,
        "num_thread": 8,
    }

    async def main() -> Answer:
        async with bench.running():
            return await bench.post(CHAT, body(options=options))

    answer, params = run(main()), bench.ended[0].request.params
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 7, 0.75)
    assert (params.min_p, params.seed, params.max_tokens) == (0.25, 11, 3)
    assert (params.stop, params.repetition_penalty) == (("zz",), 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 1)
    assert WARNING not in answer.headers


@pytest.mark.parametrize("named", [(), ("temperature",)])
def test_defaults_are_ollamas_where_the_checkpoint_sets_none(named: tuple[str, ...]) -> None:
    """And no limit of tokens, no seed."""
    temperature = 0.25 if named else 1.0
    defaults = SamplingDefaults(temperature=temperature, named=named)
    bench = ServerBench(sampling_defaults=defaults, max_model_len=64)

    async def main() -> None:
        async with bench.running():
            await bench.post(CHAT, {"model": "tiny", "messages": [QUESTION], "stream": False})

    run(main())
    params = bench.ended[0].request.params
    assert params.temperature == (0.25 if named else OLLAMA_DEFAULTS["temperature"])
    assert (params.top_k, params.top_p, params.seed) == (40, 0.9, None)
    assert params.max_tokens is None


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"mirostat": 2}, "options.mirostat"),
        ({"typical_p": 0.5}, "options.typical_p"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "options.repeat_last_n"),
        ({"num_ctx": 1 << 20}, "--max-model-len"),
        ({"temprature": 1}, "options.temprature"),
    ],
)
def test_options_that_are_ignored_are_named(options: dict[str, Any], word: str) -> None:
    """If they would change the answer, or are unknown."""
    assert word in ask(CHAT, body(options=options)).headers[WARNING]


def test_no_penalties_without_a_window() -> None:
    """`repeat_last_n: 0` turns them off, as in Ollama."""
    bench = ServerBench()
    penalties = {"repeat_penalty": 2, "presence_penalty": 1, "frequency_penalty": 1}

    async def main() -> None:
        async with bench.running():
            await bench.post(CHAT, body(options=penalties | {"repeat_last_n": 0}))

    run(main())
    params = bench.ended[0].request.params
    assert (params.repetition_penalty, params.presence_penalty) == (1, 0)
    assert params.frequency_penalty == 0


def test_no_tokens_compute_the_prompt_only() -> None:
    """`num_predict: 0`: the next request reads it."""
    bench = ServerBench()
    talk = [{"role": "system", "content": LONG}, QUESTION]

    async def main() -> tuple[Answer, Answer]:
        async with bench.running():
            first = await bench.post(CHAT, body(*talk, options={"num_predict": 0}))
            return first, await bench.post(CHAT, body(*talk))

    warmed, answered = (answer.json for answer in run(main()))
    assert (warmed["message"]["content"], warmed["eval_count"]) == ("", 0)
    assert answered["ramify_cache"]["read"] >= 32


def test_a_context_goes_on_with_the_very_tokens() -> None:
    """The prompt is that of the conversation, and all of it but the new turn is read."""
    bench = ServerBench(page_size=1)

    async def main() -> tuple[Answer, Answer]:
        async with bench.running():
            first = await bench.post(GENERATE, question("Who is Ann?", system="Be brief."))
            context = first.json["context"]
            second = await bench.post(GENERATE, question("And Bob?", context=context))
            return first, second

    first, second = (answer.json for answer in run(main()))
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who is Ann?"},
        {"role": "assistant", "content": first["response"]},
        {"role": "user", "content": "And Bob?"},
    ]
    ids, decode = bench.ended[1].request.prompt.ids.tolist(), bench.service.tokenizer.decode
    assert ids[: len(first["context"])] == first["context"]
    assert decode(ids, False) == decode(prompt_of(CHAT, body(*talk)), False)
    assert second["context"][: len(ids)] == ids
    # Of the answer's last token nothing was computed yet.
    assert second["ramify_cache"]["read"] == len(first["context"]) - 1
    assert [part.path for part in bench.ended[1].request.prompt.segments] == ["context", "prompt"]


def test_a_context_has_the_thoughts() -> None:
    """They stay cached, though the template drops them from the next turn of a chat."""
    template = TOOL_TEMPLATE.replace("if message.reasoning_content", "if false")
    bench = ServerBench(page_size=1, chat_template=template)
    bench.device.next_token = Script(bench, THOUGHT_TEXT)
    request = question(options={"num_predict": 200})

    async def main() -> tuple[Answer, Answer]:
        async with bench.running():
            first = await bench.post(GENERATE, request)
            await bench.until_idle()
            context = first.json["context"]
            return first, await bench.post(GENERATE, request | {"context": context})

    first, second = (answer.json for answer in run(main()))
    assert (first["thinking"], "Hm." in first["response"]) == ("Hm.", False)
    assert second["ramify_cache"]["read"] >= len(first["context"]) - 1


@pytest.mark.parametrize("text", ["Ann.", "Ann STOP there"])
def test_a_context_ends_with_the_text(text: str) -> None:
    """Without the token that ended the answer, or the stop text."""
    bench = ServerBench()
    request = question(options={"num_predict": 50, "stop": ["STOP"]})

    context = ask(GENERATE, request, next_text=text).json["context"]

    expected = text.partition("STOP")[0]
    assert bench.service.tokenizer.decode(context, False).endswith(f"<|assistant|>{expected}")


def test_a_raw_prompt_has_no_template_and_no_context() -> None:
    """Its tokens are those of /v1/completions."""
    answer = ask(GENERATE, question("Rome<|end|>", raw=True)).json

    assert "context" not in answer
    raw = prompt_of(GENERATE, question("Rome<|end|>", raw=True))
    assert raw == prompt_of("/v1/completions", {"prompt": "Rome<|end|>", "max_tokens": 4})


@pytest.mark.parametrize(
    ("path", "request_", "message"),
    [
        (CHAT, body() | {"model": "gone"}, "model 'gone' not found; this server has tiny:latest"),
        (CHAT, {"messages": [QUESTION]}, "model is required"),
        (
            CHAT,
            body(QUESTION | {"images": ["AAAA"]}),
            "messages[0].images[0]: image content is not served",
        ),
        (CHAT, body(QUESTION | {"role": "poet"}), "messages[0].role: 'poet' is no role"),
        (CHAT, body(format="xml"), "format: 'xml' is no format"),
        (CHAT, body(think="deeply"), "think: 'deeply' is no level"),
        (CHAT, body(think=True), 'think: "tiny" does not support thinking'),
        (CHAT, body(options={"temperature": -1}), "options.temperature: "),
        (CHAT, body(options={"top_k": "many"}), "options.top_k: "),
        (CHAT, body(QUESTION | {"content": "Q z " * 1500}), "messages: This model's maximum"),
        (CHAT, body(_debug_render_only=True), "_debug_render_only: "),
        (GENERATE, question("Q z " * 1500), "prompt: This model's maximum context length is 2048"),
        (GENERATE, question("Q z " * 1500, raw=True), "prompt: This model's maximum"),
        (GENERATE, question(images=["AAAA"]), "images[0]: image content is not served"),
        (GENERATE, question(images=["AAAA"], raw=True), "images[0]: image content is not served"),
        (GENERATE, question(suffix="x"), 'suffix: "tiny" does not support insert'),
        (GENERATE, question(template="{{ .Prompt }}"), "template: the model's own"),
        (GENERATE, question(raw=True, system="x"), "raw: raw mode does not support"),
        (GENERATE, question(context=[-1]), "context[0]: -1 is no token id"),
        (GENERATE, question(context=[10**6]), "1000000"),
        (GENERATE, question(context=[1] * 3000), "maximum context length"),
        ("/api/show", {"model": "gone"}, "model 'gone' not found"),
        ("/api/embed", {"model": "tiny", "input": ["a", ""]}, "input[1] is empty"),
        ("/api/pull", {"model": "llama3.2"}, "models are not managed here"),
        ("/api/nothing", {}, "there is nothing at /api/nothing"),
    ],
)
def test_errors_are_a_text(path: str, request_: Any, message: str) -> None:
    """`{"error": …}`, which names the field and the way out; 404 for a model that is not there."""
    answer = ask(path, request_)

    assert answer.json.keys() == {"error"}
    assert message in answer.json["error"]
    is_absent = "not found" in message or "nothing at" in message
    assert answer.status == (404 if is_absent else 400)


def test_a_model_that_thinks_may_be_told() -> None:
    """By the switch of its template, which other models do not have."""
    template = TOOL_TEMPLATE + "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    ids = {
        think: prompt_of(CHAT, body(think=think), chat_template=template)
        for think in (None, False, True)
    }

    assert len({tuple(prompt) for prompt in ids.values()}) == 3
    assert ask(CHAT, body(think=False)).status == 200


def test_errors_of_full_queues_say_when_to_come_back() -> None:
    """503 with `Retry-After`, in Ollama's form."""
    bench = ServerBench(max_waiting=1, max_num_seqs=1)

    async def main() -> list[Answer]:
        async with bench.running():
            requests = (bench.post(CHAT, body(options={"num_predict": 300})) for _ in range(8))
            return list(await asyncio.gather(*requests))

    refused = [answer for answer in run(main()) if answer.status != 200]
    assert refused
    for answer in refused:
        assert (answer.status, answer.json.keys()) == (503, {"error"})
        assert int(answer.headers["retry-after"]) >= 1


def test_keys_and_tenants_are_those_of_the_server() -> None:
    """401 without a key; a tenant reads its own prefixes only."""
    bench = ServerBench(keys=ApiKeys.of("ann", "bob"))
    talk = body({"role": "system", "content": LONG}, QUESTION)

    async def main() -> list[Answer]:
        async with bench.running():
            return [await bench.post(CHAT, talk, key) for key in (None, "ann", "bob", "ann")]

    refused, first, other, again = run(main())
    assert (refused.status, refused.json.keys()) == (401, {"error"})
    reads = [answer.json["ramify_cache"]["read"] for answer in (first, other, again)]
    assert reads[:2] == [0, 0]
    assert reads[2] > 0


def test_sessions_and_salts_are_those_of_the_server() -> None:
    """`session_id`, `end_session` and `cache_salt` stand beside Ollama's fields."""
    bench = ServerBench()
    talk = [{"role": "system", "content": LONG}, QUESTION]

    async def main() -> list[Any]:
        async with bench.running():
            first = await bench.post(CHAT, body(*talk, session_id="a"))
            salted = await bench.post(CHAT, body(*talk, cache_salt="s"))
            ended = await bench.call("DELETE", "/v1/sessions/a")
            return [first.status, salted.json["ramify_cache"]["read"], ended.status]

    assert run(main()) == [200, 0, 200]


@pytest.mark.parametrize(
    ("path", "request_"),
    [(CHAT, body()), (GENERATE, question(system="Be brief."))],
)
def test_a_request_is_explained(path: str, request_: dict[str, Any]) -> None:
    """`/v1/cache/explain` takes its body, and counts the tokens of its prompt."""
    explained = ask("/v1/cache/explain", request_).json

    assert explained["prompt_tokens"] == len(prompt_of(path, request_))
    assert explained["miss"]["reason"]


def test_a_silent_stream_is_kept_alive() -> None:
    """By white space before the next line, which no parser minds."""
    bench = ServerBench()
    bench.server.ping_s = 0.01
    gate = gated(bench)

    async def main() -> Answer:
        async with bench.running():
            answer = asyncio.create_task(bench.post(CHAT, body() | {"stream": True}))
            for _ in range(2):  # the prompt with the first token, then one token
                await gate.arrive()
                gate.allowed.release()
            await gate.arrive()
            await asyncio.sleep(0.05)
            gate.open()
            return await answer

    answer = run(main())
    assert b"\n " in answer.body
    assert lines(answer)[-1]["done"]


def test_a_client_that_leaves_ends_its_request() -> None:
    """Within a stream; nothing of it is left."""
    long = {"model": "fake", "prompt": "Hi", "raw": True, "options": {"num_predict": 1500}}
    with live() as server:
        with httpx.stream("POST", server.url + GENERATE, json=long, timeout=60) as answer:
            assert json.loads(next(answer.iter_lines()))["done"] is False
        server.until_idle()
        assert server.metrics()["ramify_computed_tokens_total"] < 1500
