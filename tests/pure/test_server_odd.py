"""Requests that are JSON of the right form and cannot be served all the same."""

import pytest

from tests.pure.server_bench import ServerBench, chat, run

pytest.importorskip("starlette")


@pytest.mark.parametrize(
    "name",
    ["self", "messages", "parts", "tools", "continues", "known", "add_generation_prompt"],
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
