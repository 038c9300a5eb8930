"""Requests that are well-formed JSON and still cannot be served."""

from typing import Any

import pytest

from ramify.engine.text.incremental_encoder import IncrementalEncoder
from ramify.engine.text.tokenizer import Tokenizer
from ramify.server.openai.chat_request import chat_to_generation
from ramify.server.openai.protocol import ChatMessage, ChatRequest
from ramify.server.tenants import ApiKeys, Caller, Quota, hash_key
from tests.pure.server_bench import TINY, ServerBench, chat, run

pytest.importorskip("starlette")

ASKED: dict[str, Any] = {
    "messages": [ChatMessage("user", "A question of some length, " * 20)],
    "max_tokens": 500,
    "ignore_eos": True,
}


@pytest.mark.parametrize(
    "name",
    [
        "self",
        "messages",
        "parts",
        "tools",
        "known",
        "add_generation_prompt",
    ],
)
def test_template_variables_that_the_server_sets_are_refused(name: str) -> None:
    """`chat_template_kwargs` cannot name what the server itself gives: that is 400, not 500."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            body = chat("Hello", chat_template_kwargs={name: True})

            answer = await bench.post("/v1/chat/completions", body)

            assert answer.status == 400
            assert answer.json["error"]["param"] == "chat_template_kwargs"

    run(main())


def test_messages_of_nothing_but_hidden_thoughts_are_refused() -> None:
    """Blocks that are left out of the prompt leave nothing to answer: that is 400, not 500."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            content = [{"type": "redacted_thinking"}]
            message = {"role": "user", "content": content}
            body = {"model": "tiny", "max_tokens": 1, "messages": [message]}

            answer = await bench.post("/v1/messages", body)

            assert answer.status == 400
            assert answer.json["error"]["type"] == "invalid_request_error"

    run(main())


def test_what_one_tenant_asked_does_not_make_another_ones_prompt_faster() -> None:
    """Tokenised texts are cached per tenant: a tenant's text saves no tokenising for another."""

    async def main() -> None:
        async with ServerBench(keys=ApiKeys.of("ann", "bob")).running() as bench:
            encoder, body = (
                bench.service.prompt_renderer._encoder,
                chat("A long and secret text. " * 20),
            )
            took = []
            for key in ("ann", "ann", "bob"):
                before = encoder.num_encoded
                for path in ("/v1/chat/completions", "/v1/cache/explain"):
                    assert (await bench.post(path, body, key)).status == 200
                took.append(encoder.num_encoded - before)

            assert took[1] < took[0] == took[2]

    run(main())


def test_fronts_are_only_looked_up_where_a_text_as_long_is_remembered() -> None:
    """The encoder's text lengths match its remembered texts, also after it has forgotten some."""
    tokenizer = Tokenizer.load(TINY)
    encoder = IncrementalEncoder(tokenizer, max_tokens=500)
    for at in range(20):
        encoder.encode("<|user|>" + "word " * at + "<|end|>\n", "ann")

    assert sum(encoder._lengths.values()) == len(encoder._remembered)
    assert 0 < len(encoder._remembered) < 20
    assert len(encoder._lengths) <= len(encoder._remembered)


def test_who_goes_away_pays_for_what_was_computed() -> None:
    """A client that disconnects early is charged for the tokens computed so far."""

    async def main() -> None:
        who = Caller("ann", quota=Quota(tokens_per_minute=1000))
        async with ServerBench(keys=ApiKeys({hash_key("ann"): who})).running() as bench:
            service, request = bench.service, ChatRequest(**ASKED)
            job = chat_to_generation(request, service)
            generation = await service.start(job, who, prefix="chatcmpl-")

            await generation.close()

            use = generation.cache
            assert generation.output is None
            assert use is not None
            num_computed = use.computed + generation.num_output
            assert service.quotas._usage["ann", False].used == pytest.approx(num_computed, abs=10)

    run(main())


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/responses", {"input": "Hello", "metadata": {"a": "x" * 513}}),
        ("/v1/responses", {"input": "Hello", "user": "x" * 257}),
        ("/v1/chat/completions", chat("Hello", service_tier="x" * 257)),
        ("/v1/chat/completions", chat("Hello", chat_template_kwargs={"a": "x" * 40_000})),
    ],
)
def test_what_is_remembered_of_a_request_is_bounded(path: str, field: dict[str, Any]) -> None:
    """Fields that no context bounds have a bound of their own."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            answer = await bench.post(path, field)

            assert answer.status == 400

    run(main())


def test_explain_goes_on_from_an_earlier_response() -> None:
    """Explain covers the prompt that the request would have, earlier turns included."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            first = {"input": "Tell me of the violin. " * 5, "max_output_tokens": 8}
            response = (await bench.post("/v1/responses", first)).json
            later = {
                "input": "More",
                "previous_response_id": response["id"],
                "max_output_tokens": 1,
            }

            explained = (await bench.post("/v1/cache/explain", later)).json
            answered = (await bench.post("/v1/responses", later)).json
            unknown = await bench.post("/v1/cache/explain", later | {"previous_response_id": "x"})

            assert explained["prompt_tokens"] == answered["usage"]["input_tokens"]
            assert unknown.status == 404

    run(main())


def test_a_request_that_is_not_stored_leaves_no_record() -> None:
    """`store: false` of both of OpenAI's APIs; without it, only the responses API keeps text."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            history = bench.service.history
            for path, body in (
                ("/v1/responses", {"input": "Hello", "max_output_tokens": 3}),
                ("/v1/chat/completions", chat("Hello")),
            ):
                assert (await bench.post(path, body | {"store": False})).status == 200
                assert (len(history), history.num_bytes) == (0, 0)
            kept = [(await bench.post(*args)).json["id"] for args in STORED]
            entries = [history.get("", id_) for id_ in kept]
            assert [entry is not None and entry.response is not None for entry in entries] == [
                True,
                False,
                False,
            ]
            assert "walrus" not in str(entries[1:])

    run(main())


WALRUS = {"type": "text", "json_schema": {"name": "n", "schema": {"description": "walrus" * 9}}}
STORED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/responses", {"input": "walrus", "max_output_tokens": 3}),
    ("/v1/chat/completions", chat("walrus", response_format=WALRUS)),
    ("/v1/completions", {"prompt": "walrus", "max_tokens": 3}),
)


def test_large_fields_that_are_only_compared_leave_digests() -> None:
    """Forty requests with a megabyte in a schema's description leave a few kilobytes each."""
    form = {"name": "n", "schema": {"type": "object", "description": "x" * 2**20}}

    async def main() -> None:
        async with ServerBench().running() as bench:
            for number in range(40):
                body = chat(f"{number}", response_format={"type": "text", "json_schema": form})
                assert (await bench.post("/v1/chat/completions", body)).status == 200

            assert len(bench.service.history) == 40
            assert bench.service.history.num_bytes < 40 * 4096

    run(main())
