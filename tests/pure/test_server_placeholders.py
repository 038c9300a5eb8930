"""Images and audio of the turn to be answered are refused; elsewhere, and files, become placeholders."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from ramify.server.prompts.content_placeholders import PLACEHOLDER_NOUNS, placeholder_warnings
from tests.pure.server_bench import TOOL_TEMPLATE, ServerBench, run

pytest.importorskip("starlette")

IMAGE = "[image: not served by this model]"
URL = "data:image/png;base64,AAAA"


# What follows a turn that another model has answered.
LATER = [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Its colour?"}]


def chat_body(parts: list[dict[str, Any]], *later: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": parts}, *later]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 2}


def responses_body(parts: list[dict[str, Any]], *later: Any) -> tuple[str, dict[str, Any]]:
    items = [{"role": "user", "content": parts}, *later]
    return "/v1/responses", {"input": items, "max_output_tokens": 2}


def messages_body(parts: list[dict[str, Any]], *later: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": parts}, *later]
    return "/v1/messages", {"model": "tiny", "max_tokens": 2, "messages": messages}


def ollama_body(text: str, images: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """An image in an earlier turn, as Ollama's clients send it again in each."""
    messages = [{"role": "user", "content": text, "images": [*images]}, *LATER]
    return "/api/chat", {"model": "tiny", "messages": messages, "stream": False}


# A body with a part that is no text, and one with its placeholder as text.
SAME_PROMPTS = [
    (
        chat_body([{"type": "text", "text": "a"}, {"type": kind, kind: {"url": URL}}], *later),
        chat_body([{"type": "text", "text": "a"}, {"type": "text", "text": placeholder}], *later),
    )
    for kind, placeholder, later in (
        ("image_url", IMAGE, LATER),
        ("input_audio", "[audio: not served by this model]", LATER),
        ("file", "[file: not served by this model]", []),
    )
]
SAME_PROMPTS += [
    (
        responses_body([{"type": "input_image", "image_url": URL}], *LATER),
        responses_body([{"type": "input_text", "text": IMAGE}], *LATER),
    ),
    (
        ollama_body("Look!", [URL]),
        ollama_body(f"Look!\n{IMAGE}"),
    ),
    (
        responses_body([{"type": "input_file", "file_data": "AAAA"}]),
        responses_body([{"type": "input_text", "text": "[file: not served by this model]"}]),
    ),
]


@pytest.mark.parametrize(
    ("wrapper", "reason"),
    [
        (None, "the model 'tiny' reads text only"),
        (
            "Gemma3ForConditionalGeneration",
            "of Gemma3ForConditionalGeneration only the text decoder",
        ),
    ],
)
@pytest.mark.parametrize(
    ("body", "noun", "param"),
    [
        (chat_body([{"type": "image_url", "image_url": {"url": URL}}]), "image", "messages[0].content[0]"),
        (chat_body([{"type": "input_audio", "input_audio": {"data": "AA"}}]), "audio", "messages[0].content[0]"),
        (responses_body([{"type": "input_image", "image_url": URL}]), "image", "input[0].content[0]"),
        (
            messages_body(
                [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}]
            ),
            "image",
            "messages[0].content[0]",
        ),
    ],
)  # fmt: skip
def test_an_image_or_a_sound_to_answer_is_refused(
    body: Any, noun: str, param: str, wrapper: str | None, reason: str
) -> None:
    """One error that names content, model and way out; text is answered, and a file is a placeholder."""

    async def main() -> None:
        async with ServerBench(wrapper=wrapper).running() as bench:
            refused = await bench.post(*body)
            text = await bench.post(*chat_body([{"type": "text", "text": "a"}]))
            file = await bench.post(*chat_body([{"type": "file", "file": {"url": URL}}]))

        error = refused.json["error"]
        assert refused.status == 400
        assert f"{noun} content is not served: {reason}" in error["message"]
        assert "say in words what it shows" in error["message"]
        assert param in str(error.get("param") or error["message"])
        assert (text.status, file.status) == (200, 200)

    run(main())


def test_the_turn_to_answer_is_what_no_answer_follows() -> None:
    """An image before a prefill is refused, as one in the first of several messages; earlier ones are not."""
    image = [{"type": "image_url", "image_url": {"url": URL}}]
    question = {"role": "user", "content": "What is it?"}
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    # Codex puts the image that a tool loads into a message of the user.
    loop = [
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "loaded"},
        {"role": "user", "content": image},
    ]

    async def main() -> None:
        async with ServerBench(chat_template=TOOL_TEMPLATE).running() as bench:
            path, several = chat_body(image, question)
            assert (await bench.post(path, several)).status == 400
            assert (await bench.post(*chat_body(image, LATER[0]))).status == 400
            later = await bench.post(*chat_body(image, *LATER))
            assert later.status == 200
            assert later.json["usage"]["ramify_cache"]["placeholders"] == ["messages[0].content[0]"]
            looped = await bench.post(path, several | {"messages": loop})
            assert looped.status == 200, looped.body
            assert looped.json["usage"]["ramify_cache"]["placeholders"] == [
                "messages[3].content[0]"
            ]

    run(main())


@pytest.mark.parametrize(("body", "same_body"), SAME_PROMPTS)
def test_content_that_is_not_text_is_a_placeholder(body: Any, same_body: Any) -> None:
    """The prompt is that of the placeholder as text, and `X-Ramify-Warning` names the path."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            answer = await bench.post(*body)
            assert answer.status == 200, answer.body
            assert "not served by this model" in answer.headers["x-ramify-warning"]
            assert re.search(
                r"(content|images)\[0\]|content\[1\]", answer.headers["x-ramify-warning"]
            )

            same = await bench.post(*same_body)
            assert "x-ramify-warning" not in same.headers

            prompts = [generation.request.prompt.text for generation in bench.ended]
            assert prompts[0] == prompts[1]

    run(main())


def test_an_image_in_the_output_of_a_call_is_a_placeholder() -> None:
    """Also in the Responses API, whose outputs of calls may be lists of parts."""

    async def main() -> None:
        async with ServerBench(chat_template=TOOL_TEMPLATE).running() as bench:
            call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
            output = [{"type": "input_image", "image_url": URL}]
            items = [
                {"role": "user", "content": "Look!"},
                call,
                {"type": "function_call_output", "call_id": "c", "output": output},
            ]

            answer = await bench.post("/v1/responses", {"input": items, "max_output_tokens": 2})

            assert answer.status == 200, answer.body
            assert IMAGE in bench.ended[0].request.prompt.text
            assert "x-ramify-warning" in answer.headers

    run(main())


@pytest.mark.parametrize("make_body", [chat_body, responses_body, messages_body])
def test_an_unknown_type_of_content_is_refused(make_body: Any) -> None:
    """A 400 that names the type and the path."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            answer = await bench.post(*make_body([{"type": "hologram"}]))

            assert answer.status == 400
            error = answer.json["error"]
            assert "'hologram'" in error["message"]
            assert "[0]" in (error.get("param") or error["message"])

    run(main())


def test_a_warning_names_the_first_path_and_counts() -> None:
    """One line for each kind, however many blocks there are."""
    blocks = [("a", "text"), ("b", "image"), ("c", "file"), ("d", "image_url"), ("e", "image")]

    warnings = placeholder_warnings(blocks)

    assert warnings == [
        "image content is not served by this model, the prompt has a placeholder: b and 2 more",
        "file content is not served by this model, the prompt has a placeholder: c",
    ]
    assert "text" not in PLACEHOLDER_NOUNS
