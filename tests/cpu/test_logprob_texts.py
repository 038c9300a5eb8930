"""Logprobs of parts of characters: the token's own bytes, names that do not collide, offsets in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from ramify.engine.text.ranked_bpe import byte_letters
from ramify.engine.text.tokenizer import Tokenizer
from ramify.outputs import TokenLogprob
from ramify.server.openai.completion_logprobs import CompletionLogprobs
from ramify.server.openai.protocol import CompletionRequest
from tests.pure.server_bench import ServerBench, run

pytest.importorskip("starlette")
END = "<|end|>"
TEXT = "né 🙂x"


def byte_level() -> Tokenizer:
    """A token for each byte: a character of four bytes is four tokens."""
    vocab = {letter: byte for byte, letter in byte_letters().items()}
    core = Core(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(END, normalized=False)])
    return Tokenizer(core, special_tokens={"eos_token": END}, chat_templates={})


def byte_fallback() -> Tokenizer:
    """Words begin with a mark, and bytes have tokens of their own, as in Llama 2."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "n", "x"]
    core = Core(
        models.BPE({piece: place for place, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.add_special_tokens([AddedToken(END, normalized=False)])
    return Tokenizer(core, special_tokens={"eos_token": END}, chat_templates={})


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text, a byte each where there is no better token."""
    return tokenizer.encode(
        text.replace(" ", "▁") if tokenizer.token_text(0) == "<unk>" else text
    ).tolist()


@pytest.mark.parametrize(
    "tokenizer", [byte_level(), byte_fallback()], ids=["byte level", "fallback"]
)
def test_a_token_has_its_own_bytes(tokenizer: Tokenizer) -> None:
    """Joined they are the text; a part of a character is not the mark that replaces it."""
    ids = ids_of(tokenizer, TEXT)

    parts = [tokenizer.token_bytes(token) for token in ids]

    assert b"".join(parts) == TEXT.encode()
    assert b"\xef\xbf\xbd" not in parts
    assert tokenizer.token_bytes(tokenizer.eos_token_ids[0]) == END.encode()
    assert tokenizer.token_bytes(100_000) == b""


def test_every_token_of_a_model_has_the_bytes_of_its_text() -> None:
    """Where the text is whole."""
    from tests.pure.server_bench import tokenizer_with

    tokenizer = tokenizer_with(None)
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_text(token)
        if "\ufffd" not in text:
            assert tokenizer.token_bytes(token) == text.encode(), token


def completion_logprobs(tokenizer: Tokenizer, ids: Sequence[int], top: dict[int, float]) -> Any:
    request = CompletionRequest(prompt="x", logprobs=5)
    entries = [TokenLogprob(token, -1.0, top) for token in ids]
    return CompletionLogprobs(request, tokenizer, 5).add(entries)


def test_offsets_count_characters_of_the_text() -> None:
    """Tokens of one character begin together; tokens that are not shown have no length."""
    tokenizer = byte_level()
    ids = [*ids_of(tokenizer, "né 🙂"), *tokenizer.eos_token_ids, *ids_of(tokenizer, "x")]

    offsets = completion_logprobs(tokenizer, ids, {})["text_offset"]

    assert offsets == [0, 1, 1, 2, 3, 3, 3, 3, 4, 4]


def test_two_tokens_of_one_text_are_two_entries() -> None:
    """Parts of characters are named by their bytes, equal texts by their ids; the token keeps its name."""
    tokenizer = byte_level()
    first, second = ids_of(tokenizer, "é")

    payload = completion_logprobs(tokenizer, [second], {first: -0.5, second: -1.0})

    assert payload["tokens"] == ["bytes:\\xa9"]
    assert payload["top_logprobs"] == [{"bytes:\\xc3": -0.5, "bytes:\\xa9": -1.0}]

    fallback = byte_fallback()
    letter, byte = fallback.encode("x").tolist()[0], 1 + ord("x")
    payload = completion_logprobs(
        fallback, [byte], {letter: -0.5, byte: -1.0, 100_000: -2.0, 100_001: -3.0}
    )

    assert payload["tokens"] == ["x"]
    assert payload["top_logprobs"] == [
        {f"token_id:{letter}": -0.5, "x": -1.0, "": -2.0, "token_id:100001": -3.0}
    ]


def test_the_apis_show_bytes_and_offsets() -> None:
    """Chat, Responses, completions whole, as a stream and with the prompt echoed."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = byte_level()
    tokenizer._chat_templates = type(tokenizer._chat_templates)({"default": template}, {})
    script = [*ids_of(tokenizer, TEXT), *tokenizer.eos_token_ids]
    own_bytes = [list(tokenizer.token_bytes(token)) for token in script]
    prompt = "à b"
    num_prompt = len(ids_of(tokenizer, prompt))

    async def main() -> None:
        bench = ServerBench(tokenizer=tokenizer)
        bench.device.next_token = lambda context: script[(len(context) - num_prompt) % len(script)]
        async with bench.running():
            chat = {"messages": [{"role": "user", "content": prompt}], "logprobs": True}
            answer = await bench.post("/v1/chat/completions", chat | {"top_logprobs": 1})
            content = answer.json["choices"][0]["logprobs"]["content"]
            assert [entry["bytes"] for entry in content][: len(script) - 1] == own_bytes[:-1]

            body = {"input": prompt, "top_logprobs": 1}
            answer = await bench.post("/v1/responses", body)
            entries = answer.json["output"][0]["content"][0]["logprobs"]
            assert [entry["bytes"] for entry in entries][: len(script) - 1] == own_bytes[:-1]

            plain = {"prompt": prompt, "max_tokens": 30, "logprobs": 1}
            expected = [0, 1, 1, 2, 3, 3, 3, 3, 4, 5]
            [choice] = (await bench.post("/v1/completions", plain)).json["choices"]
            assert choice["text"] == TEXT
            assert choice["logprobs"]["text_offset"] == expected

            streamed = await bench.post("/v1/completions", plain | {"stream": True})
            offsets: list[int] = []
            for event in streamed.events:
                offsets += event["choices"][0]["logprobs"]["text_offset"]
            assert offsets == expected

            [choice] = (await bench.post("/v1/completions", plain | {"echo": True})).json["choices"]
            assert choice["text"] == prompt + TEXT
            assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2] + [3 + at for at in expected]

    run(main())
