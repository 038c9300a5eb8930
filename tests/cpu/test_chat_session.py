"""Chat sessions: what each turn renders, which ids it keeps, and what it computes again."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.llm import LLM
from ramify.engine.sessions.session import Session
from ramify.engine.text.detokenizer import Detokenizer
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import ChatTemplateError, InvalidParamsError, PromptTooLongError
from ramify.params import SamplingParams
from ramify.testing import TINY_CHAT_TEMPLATE, write_tiny_checkpoint
from tests.budget import examples
from tests.pure.engine_bench import Bench

END = 2
# Drops what an answer says before </think>, as templates of thinking models do.
FORGETFUL = TINY_CHAT_TEMPLATE.replace(
    "message.content ~", "(message.content.split('</think>')[-1] if message.content else '') ~"
)
# No special token anywhere.
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("chat") / "llama", "llama")


def tokenizer_of(folder: Path, template: str = TINY_CHAT_TEMPLATE) -> Tokenizer:
    import tokenizers

    tokenizer = Tokenizer.load(folder)
    return Tokenizer(
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
        special_tokens=tokenizer.special_tokens,
        chat_templates={"default": template},
    )


def talking(tokenizer: Tokenizer) -> tuple[LLM, Callable[[Sequence[int]], None]]:
    script: list[int] = []
    bench = Bench(page_size=1, next_token=lambda context: script.pop(0))
    bench.core.lifecycle.vocab_size = 400
    bench.core.lifecycle.eos_token_ids = frozenset({END})
    bench.core.lifecycle.detokenizer_factory = partial(Detokenizer, tokenizer)

    def say(ids: Sequence[int]) -> None:
        script[:] = ids

    return LLM.from_core(bench.core, tokenizer), say


def rendered(tokenizer: Tokenizer, session: Session) -> array[int]:
    return tokenizer.encode_chat(session.messages)


def test_turns_are_the_conversation_rendered_at_once(folder: Path) -> None:
    """Each prompt is the whole conversation; a turn computes only what follows the last answer."""
    tokenizer = tokenizer_of(folder)
    llm, say = talking(tokenizer)
    session = llm.session(system="You are kind.")
    for question, answer in (("who?", "the other line"), ("when?", " in the north"), ("so", "a")):
        session.append(question)
        wanted = rendered(tokenizer, session)
        known = len(session.token_ids)
        say([*tokenizer.encode(answer, add_special_tokens=False), END])

        output = session.generate(SamplingParams(max_tokens=50))

        assert output.prompt_token_ids == tuple(wanted)
        assert output.text == answer
        assert output.cache.read_tokens >= known - 1
        assert session.messages[-1] == {"role": "assistant", "content": answer}


def test_generated_ids_stay_whatever_the_tokenizer_would_make_of_them(folder: Path) -> None:
    """Generated ids are kept and hit the cache, even if the tokenizer would split differently."""
    tokenizer = tokenizer_of(folder)
    llm, say = talking(tokenizer)
    session = llm.session(messages=[{"role": "user", "content": "x"}])
    odd = [token for letter in "the the" for token in tokenizer.encode(letter, False)]
    assert odd != list(tokenizer.encode("the the", False))
    say([*odd, END])
    session.generate()
    known = session.token_ids
    session.append("more")
    say([END])

    output = session.generate()

    assert output.prompt_token_ids[: len(known)] == known
    assert tokenizer.decode(output.prompt_token_ids, False) == tokenizer.apply_chat_template(
        session.messages[:-1]
    )
    assert output.cache.read_tokens == len(known) - 1


def test_an_answer_cut_short_is_ended_by_the_template(folder: Path) -> None:
    """A truncated answer keeps its ids; the template adds the end token."""
    tokenizer = tokenizer_of(folder)
    llm, say = talking(tokenizer)
    session = llm.session(messages=[{"role": "user", "content": "x"}])
    say(list(tokenizer.encode("the other", False)))
    session.generate(SamplingParams(max_tokens=len(tokenizer.encode("the other", False))))
    known = session.token_ids
    session.append("more")
    say([END])

    output = session.generate()

    assert output.prompt_token_ids == tuple(tokenizer.encode_chat(session.messages[:-1]))
    assert output.cache.read_tokens == len(known) - 1


def test_what_the_template_drops_is_tokenised_again(folder: Path) -> None:
    """Only what follows the first answer that the template changes is tokenised again."""
    tokenizer = tokenizer_of(folder, FORGETFUL)
    llm, say = talking(tokenizer)
    session = llm.session(messages=[{"role": "user", "content": "x"}])
    for answer in ("so", "hm</think>the", "on"):
        say([*tokenizer.encode(answer, add_special_tokens=False), END])
        session.generate()
        session.append("and?")
    before = len(tokenizer.encode_chat(session.messages[:3])) - 2
    say([END])

    output = session.generate()

    assert output.prompt_token_ids == tuple(tokenizer.encode_chat(session.messages[:-1]))
    assert "think" not in tokenizer.decode(output.prompt_token_ids, False)
    assert output.cache.read_tokens >= before


def test_a_template_without_special_tokens_keeps_what_was_generated(folder: Path) -> None:
    """The text is the template's; the answers keep their generated ids."""
    tokenizer = tokenizer_of(folder, PLAIN)
    llm, say = talking(tokenizer)
    session = llm.session(messages=[{"role": "user", "content": "x"}])
    answer = tokenizer.encode(" the", add_special_tokens=False)
    say([*answer, END])
    first = session.generate()
    session.rollback(1)
    session.append({"role": "assistant", "content": "the"})
    session.append("more")
    say([END])

    output = session.generate()

    assert tokenizer.decode(output.prompt_token_ids, False) == (
        "user: x\nassistant: the\nuser: more\nassistant:"
    )
    assert output.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids


def test_forks_and_rollbacks_of_a_conversation(folder: Path) -> None:
    """A session forks, and rolls back by count or mark; a refused message leaves it usable."""
    tokenizer = tokenizer_of(folder)
    llm, say = talking(tokenizer)
    session = llm.session(system="kind", messages=[{"role": "user", "content": "x"}])
    mark = session.mark()
    say([*tokenizer.encode("one", False), END])
    session.generate()
    [twin] = session.fork(1)
    twin.append({"role": "nobody", "content": "?"})
    with pytest.raises(ChatTemplateError):
        twin.generate()
    twin.rollback(1)
    twin.rollback(mark)
    say([*tokenizer.encode("two", False), END])

    assert twin.generate().text == "two"
    assert [message["content"] for message in session.messages] == ["kind", "x", "one"]
    assert [message["content"] for message in twin.messages] == ["kind", "x", "two"]
    with pytest.raises(InvalidParamsError, match="messages"):
        twin.append([1, 2])
    with pytest.raises(InvalidParamsError, match="3 messages"):
        twin.rollback(4)


def test_what_was_said_is_told_up_to_the_last_answer_that_still_stands(folder: Path) -> None:
    """`token_ids` ends with the last answer that rollback left; forks share no messages."""
    tokenizer = tokenizer_of(folder)
    llm, say = talking(tokenizer)
    session = llm.session(messages=[{"role": "user", "content": "x"}])
    start = session.mark()
    assert session.token_ids == ()
    say([*tokenizer.encode("one", False), END])
    first = session.generate()
    known = (*first.prompt_token_ids, *first.token_ids)
    assert session.token_ids == known
    middle = session.mark()
    session.append("the " * 5000)
    with pytest.raises(PromptTooLongError):
        session.generate()
    assert session.token_ids == known
    session.rollback(middle)
    session.append("y")
    say([*tokenizer.encode("two", False), END])
    second = session.generate()
    assert session.token_ids == (*second.prompt_token_ids, *second.token_ids)
    [fork] = session.fork(1)
    for conversation in (fork, session):
        cast("dict[str, str]", conversation.messages[0])["content"] = "EDITED"
    session.rollback(middle)
    assert session.token_ids == known
    session.rollback(start)
    assert session.token_ids == ()
    assert [message["content"] for message in fork.messages] == ["x", "one", "y", "two"]
    assert fork.token_ids == (*second.prompt_token_ids, *second.token_ids)


def test_special_tokens_in_options_are_text(folder: Path) -> None:
    """Special tokens in tool names and keys are plain text, in a session as in `chat`."""
    template = "{{ tools | tojson }}" + TINY_CHAT_TEMPLATE
    tokenizer = tokenizer_of(folder, template)
    llm, say = talking(tokenizer)
    [special] = tokenizer.decode([END], skip_special_tokens=False).split()
    messages = [{"role": "user", "content": "x"}]
    tools = [{"name": special, "parameters": {special: 1}, "description": special}]
    say([END])
    session = llm.session(messages=messages, tools=tools)
    ids = session.generate().prompt_token_ids
    say([END])
    [output] = llm.chat([messages], tools=tools, progress=False)
    plain = tokenizer.encode_chat(messages, tools=[])
    assert ids == output.prompt_token_ids
    assert list(ids).count(END) == list(plain).count(END)
    assert special in tokenizer.decode(ids, skip_special_tokens=False)
    with pytest.raises(InvalidParamsError, match="add_generation_prompt"):
        llm.session(messages=messages, add_generation_prompt=True)


TEXTS = st.text("the on in wé<|>end\n", max_size=12)


@settings(max_examples=examples(150), deadline=None)
@given(
    story=st.lists(st.tuples(st.sampled_from("ugcr"), TEXTS, st.booleans()), max_size=12),
    template=st.sampled_from([TINY_CHAT_TEMPLATE, FORGETFUL]),
)
def test_any_conversation_is_as_from_scratch(
    folder: Path, story: list[tuple[str, str, bool]], template: str
) -> None:
    """Prompts equal a fresh rendering: the text always, the ids if answers are canonical."""
    tokenizer = tokenizer_of(folder, template)
    llm, say = talking(tokenizer)
    session = llm.session(messages=[{"role": "system", "content": "s"}])
    is_plain = True
    for kind, text, flag in story:
        if kind == "u":
            session.append(text)
        elif kind == "c":
            session.append({"role": "assistant", "content": text})
        elif kind == "r":
            session.rollback(min(int(flag) + 1, len(session.messages)))
        else:
            text = text.replace("<|end|>", "")
            ids = list(tokenizer.encode(text, add_special_tokens=False))
            if flag and is_plain and text.isascii():
                ids = [token for letter in text for token in tokenizer.encode(letter, False)]
                is_plain = ids == list(tokenizer.encode(text, add_special_tokens=False))
            wanted = rendered(tokenizer, session)
            say([*ids, END])
            output = session.generate(SamplingParams(max_tokens=60))
            if is_plain:
                assert output.prompt_token_ids == tuple(wanted)
            assert tokenizer.decode(output.prompt_token_ids, False) == tokenizer.decode(
                wanted, False
            )
