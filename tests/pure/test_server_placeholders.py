"""Images, audio and files become placeholders in the prompt, in all three APIs alike."""

from typing import Any

import pytest

from ramify.server.prompts.content_placeholders import PLACEHOLDER_NOUNS, placeholder_warnings
from tests.pure.server_bench import TOOL_TEMPLATE, ServerBench, run

pytest.importorskip("starlette")

IMAGE = "[image: not served by this model]"
URL = "data:image/png;base64,AAAA"


def chat_body(parts: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}


def responses_body(parts: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": [{"role": "user", "content": parts}]}


def messages_body(parts: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": parts}]
    return "/v1/messages", {"model": "tiny", "max_tokens": 2, "messages": messages}


# A body with a part that is no text, and one with its placeholder as text.
SAME_PROMPTS = [
    (
        chat_body([{"type": "text", "text": "a"}, {"type": kind, kind: {"url": URL}}]),
        chat_body([{"type": "text", "text": "a"}, {"type": "text", "text": placeholder}]),
    )
    for kind, placeholder in (
        ("image_url", IMAGE),
        ("input_audio", "[audio: not served by this model]"),
        ("file", "[file: not served by this model]"),
    )
]
SAME_PROMPTS += [
    (
        responses_body([{"type": "input_image", "image_url": URL}]),
        responses_body([{"type": "input_text", "text": IMAGE}]),
    ),
    (
        responses_body([{"type": "input_file", "file_data": "AAAA"}]),
        responses_body([{"type": "input_text", "text": "[file: not served by this model]"}]),
    ),
]


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
def test_a_model_whose_encoder_is_not_loaded_refuses_what_it_would_read(
    body: Any, noun: str, param: str
) -> None:
    """One error that names the content; text is answered, and a file is a placeholder as elsewhere."""
    architecture = "Gemma3ForConditionalGeneration"

    async def main() -> None:
        async with ServerBench(wrapper=architecture).running() as bench:
            refused = await bench.post(*body)
            text = await bench.post(*chat_body([{"type": "text", "text": "a"}]))
            file = await bench.post(*chat_body([{"type": "file", "file": {"url": URL}}]))

        error = refused.json["error"]
        assert refused.status == 400
        assert f"{noun} content is not served: of {architecture} only the text" in error["message"]
        assert param in str(error.get("param") or error["message"])
        assert (text.status, file.status) == (200, 200)

    run(main())


@pytest.mark.parametrize(("body", "same_body"), SAME_PROMPTS)
def test_content_that_is_not_text_is_a_placeholder(body: Any, same_body: Any) -> None:
    """The prompt is that of the placeholder as text, and `X-Ramify-Warning` names the path."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            answer = await bench.post(*body)
            assert answer.status == 200, answer.body
            assert "not served by this model" in answer.headers["x-ramify-warning"]
            assert "content[" in answer.headers["x-ramify-warning"]

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
