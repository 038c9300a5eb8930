"""Tokens that a conversation's next turn reads from the cache, with scripted answers."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from ramify.config import EngineConfig, resolve
from ramify.engine.async_llm import AsyncLLM
from ramify.engine.core import EngineCore
from ramify.engine.text.detokenizer import Detokenizer
from ramify.engine.text.tokenizer import Tokenizer
from ramify.server.app import Server
from ramify.server.generation import Generation
from ramify.server.prompts.renderer import PromptRenderer
from ramify.server.service import RequestService
from ramify.testing import FakeExecutor
from tests.budget import examples
from tests.cpu.talker import HASTY_TEMPLATE, TALKER_TEMPLATE, tokenizer_with
from tests.cpu.thinker import THINKING_TEMPLATE

PAGE = 4
TALKER, HASTY = tokenizer_with(TALKER_TEMPLATE), tokenizer_with(HASTY_TEMPLATE)
END = TALKER.encode("<|end|>", add_special_tokens=False)[0]
ASSISTANT = TALKER.encode("<|assistant|>", add_special_tokens=False)[0]


class Talk:
    """A server whose model always answers with the scripted `answer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        options = EngineConfig.of(kv_cache_tokens=4096, page_size=PAGE)
        config = resolve(options, model_max_len=2048, token_bytes=1, free_memory=0)
        vocab = tokenizer.vocab_size
        device = FakeExecutor(config.num_pages, PAGE, vocab_size=vocab, next_token=self._next)
        core = EngineCore(
            config,
            device,
            vocab_size=vocab,
            eos_token_ids=[END],
            detokenizer_factory=partial(Detokenizer, tokenizer),
        )
        self.tokenizer, self.answer = tokenizer, list[int]()
        self.llm = AsyncLLM.from_core(core, tokenizer)
        self.service = RequestService(self.llm, tokenizer, model="m")
        self.generations: list[Generation] = []
        self.service.listeners.append(self.generations.append)

    def _next(self, context: Sequence[int]) -> int:
        num_generated = self.generation_len(context)
        return self.answer[num_generated] if num_generated < len(self.answer) else END

    def generation_len(self, context: Sequence[int]) -> int:
        """Count the tokens after the last assistant marker."""
        ids = list(context)
        begin = len(ids) - ids[::-1].index(ASSISTANT)
        start = list(self.tokenizer.encode("<think></think>", add_special_tokens=False))
        if self.tokenizer is HASTY and ids[begin : begin + len(start)] == start:
            begin += len(start)
        return len(ids) - begin

    @contextmanager
    def client(self) -> Iterator[TestClient]:
        with TestClient(Server(self.service).app()) as client:
            yield client

    def cached_tokens(self, client: TestClient) -> int:
        return int(client.get("/v1/cache").json()["cached_pages"]) * PAGE


def letters(text: str) -> list[int]:
    """Encode a text one letter at a time, unlike the tokenizer."""
    return [token for letter in text for token in TALKER.encode(letter, add_special_tokens=False)]


def ask(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    payload: dict[str, Any] = answer.json()
    return payload


def test_the_next_response_begins_with_the_tokens_of_the_last() -> None:
    """The next turn reuses the drawn tokens, though the tokenizer would split the text otherwise."""
    talk = Talk(TALKER)
    with talk.client() as client:
        talk.answer = letters("Ann lives in Rome")
        assert talk.answer != TALKER.encode("Ann lives in Rome", False).tolist()
        first = ask(client, "/v1/responses", instructions="Be brief.", input="Who lives in Rome?")
        before = talk.generations[-1].request.prompt.ids + array("i", talk.answer)
        talk.answer = letters("Bob")
        second = ask(
            client,
            "/v1/responses",
            instructions="Be brief.",
            input="And in Paris?",
            previous_response_id=first["id"],
        )
        ids = talk.generations[-1].request.prompt.ids
        third = ask(client, "/v1/responses", input="Oslo?", previous_response_id=second["id"])

    assert first["output"][0]["content"][0]["text"] == "Ann lives in Rome"
    assert ids[: len(before)] == before
    assert TALKER.decode(ids, False).endswith("And in Paris?<|end|><|assistant|>")
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == len(before) // PAGE * PAGE
    # without the instructions it is another conversation from the start
    assert "Be brief." not in TALKER.decode(talk.generations[-1].request.prompt.ids, False)
    assert third["output"][0]["content"][0]["text"] == "Bob"


def test_an_answer_cut_at_a_stop_text_is_told_again_as_it_was_shown() -> None:
    """After a stop string, the next prompt encodes the shown text, not the drawn tokens."""
    talk = Talk(TALKER)
    with talk.client() as client:
        talk.answer = letters("Ann. Bob.")
        first = ask(client, "/v1/chat/completions", messages=said("Who?"), stop=". ")
        assert first["choices"][0]["message"]["content"] == "Ann"
        messages = [*said("Who?"), {"role": "assistant", "content": "Ann"}, *said("And?")]
        ask(client, "/v1/chat/completions", messages=messages)

    prompt = talk.generations[-1].request.prompt
    assert prompt.ids == TALKER.encode(prompt.text, add_special_tokens=False)


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


THOUGHT = "<think>" + "Let me see. " * 20 + "</think>Ann."


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answer", [THOUGHT, "Let me see. " * 20 + "Ann."])
def test_thoughts_that_the_template_drops_are_not_kept(
    path: str, stream: bool, answer: str
) -> None:
    """The next turn reads the answer from the cache, unless the template drops its thoughts."""
    talk = Talk(TALKER)
    with talk.client() as client:
        talk.answer = list(TALKER.encode(answer, add_special_tokens=False))
        body: dict[str, Any] = {
            "model": "m",
            "messages": said("Who lives in Rome?"),
            "max_tokens": 500,
        }
        response = client.post(path, json=body | {"stream": stream})
        assert response.status_code == 200, response.text
        num_prompt = len(talk.generations[-1].request.prompt.ids)
        cached = talk.cached_tokens(client)
        messages = [*body["messages"], {"role": "assistant", "content": answer}, *said("And?")]
        ask(client, path, **body | {"messages": messages})

    use = talk.generations[-1].cache
    assert use is not None
    if answer is THOUGHT:
        assert cached == num_prompt // PAGE * PAGE
        assert use.read == cached
    else:
        assert cached == (num_prompt + len(talk.answer)) // PAGE * PAGE
        assert use.read == cached


@pytest.mark.parametrize("keeps", [True, False])
def test_thoughts_before_a_call_are_kept_if_its_result_reads_them(keeps: bool) -> None:
    """An answer with a call keeps its thoughts in the cache if the template writes them next time."""
    talk = Talk(tokenizer_with(THINKING_TEMPLATE) if keeps else TALKER)
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    call = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    with talk.client() as client:
        talk.answer = list(TALKER.encode(THOUGHT + call, add_special_tokens=False))
        answer = ask(
            client,
            "/v1/chat/completions",
            messages=said("Who lives in Rome?"),
            tools=[tool],
            max_tokens=500,
        )
        cached = talk.cached_tokens(client)

    num_prompt = len(talk.generations[-1].request.prompt.ids)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert cached == (num_prompt + len(talk.answer) if keeps else num_prompt) // PAGE * PAGE


def test_a_volatile_end_of_the_prompt_is_not_stored() -> None:
    """Only the stable part of the prompt is cached, and the next turn reads all of it."""
    talk = Talk(HASTY)
    with talk.client() as client:
        talk.answer = list(HASTY.encode("Ann lives there. " * 4, add_special_tokens=False))
        ask(client, "/v1/chat/completions", messages=said("Who lives in Rome?"))
        first = talk.generations[-1]
        cached = talk.cached_tokens(client)
        answer = {"role": "assistant", "content": "Ann lives there. " * 4}
        messages = [*said("Who lives in Rome?"), answer, *said("And?")]
        ask(client, "/v1/chat/completions", messages=messages)

    prompt = first.request.prompt
    assert 0 < prompt.num_stable_tokens < len(prompt.ids)
    assert cached == prompt.num_stable_tokens // PAGE * PAGE
    assert first.cache is not None
    assert first.cache.written == cached
    use = talk.generations[-1].cache
    assert use is not None
    assert use.read == cached


TEXTS = st.text(alphabet="abé \n<>|/think", max_size=12)


@settings(max_examples=examples(60), deadline=None)
@given(
    tokenizer=st.sampled_from([TALKER, HASTY]),
    texts=st.lists(TEXTS, min_size=1, max_size=5),
    answer=TEXTS,
    more=TEXTS,
)
def test_every_next_turn_begins_with_the_stable_part(
    tokenizer: Tokenizer, texts: list[str], answer: str, more: str
) -> None:
    """The next turn starts with the stable tokens and equals the prompt rendered from scratch."""
    roles = ["user", "assistant"]
    talk = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    maker = PromptRenderer(tokenizer)
    first = maker.chat(talk, [])
    later = [*talk, {"role": "assistant", "content": answer}, {"role": "user", "content": more}]

    second = maker.chat(later, [])

    assert second.ids[: first.num_stable_tokens] == first.ids[: first.num_stable_tokens]
    assert second.ids == tokenizer.encode(second.text, add_special_tokens=False)
    assert second.ids == PromptRenderer(tokenizer).chat(later, []).ids
