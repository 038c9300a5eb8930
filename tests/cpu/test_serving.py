"""`AsyncLLM`, weight reloads and the prefix cache, on tiny checkpoints."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from ramify import LLM, AsyncLLM, SamplingParams
from ramify.errors import CheckpointError, ConfigError, InvalidParamsError, ModelError
from ramify.params import StructuredOutput
from ramify.testing import write_tiny_checkpoint
from tests.cpu.engine_cases import assert_idle

PROMPTS = [f"the rain in the north is on the other line {name}" for name in ("a", "b", "who")]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"kv_cache_tokens": 2048, "page_size": 4, "max_batch_tokens": 32}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("old") / "llama", "llama", seed=1)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("new") / "llama", "llama", seed=2)


def answers(path: Path) -> list[tuple[int, ...]]:
    outputs = LLM(path, **OPTIONS).generate(PROMPTS, PARAMS)
    return [output.token_ids for output in outputs]


def test_weights_change_and_old_prefixes_are_never_hit(old: Path, new: Path) -> None:
    """After each reload, answers equal those of a fresh engine and hit no page of other weights."""
    wanted = {path: answers(path) for path in (old, new)}
    assert wanted[old] != wanted[new]
    llm = LLM(old, **OPTIONS)
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == wanted[old]
    mine = llm.add_request(PROMPTS[0], PARAMS)
    llm.step()

    for path in (new, old):
        llm.reload_weights(path)
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [output.token_ids for output in outputs] == wanted[path]
        assert outputs[0].cache.read_tokens == 0
        assert llm.engine.path == path
        warm = llm.generate(PROMPTS, PARAMS)
        assert all(output.cache.read_tokens for output in warm)
        assert [output.token_ids for output in warm] == wanted[path]

    while llm.has_unfinished():
        llm.step()
    assert llm.take_output(mine).token_ids == wanted[old][0]  # it had finished on its weights
    assert sum(node.is_stale for node in llm.cache.tree().nodes) >= 2
    assert_idle(llm)


def test_a_restarted_request_goes_on_with_the_new_weights(old: Path, new: Path) -> None:
    """A restarted request keeps its tokens; the new weights compute the tokens after them."""
    llm = LLM(old, **OPTIONS)
    request = llm.add_request(PROMPTS[0], PARAMS)
    streamed_ids: list[int] = []
    while len(streamed_ids) < 3:
        for _, tokens, _ in llm.step():
            streamed_ids += tokens

    llm.reload_weights(new, running="restart")
    while llm.has_unfinished():
        llm.step()

    output = llm.take_output(request)
    assert list(output.token_ids[:3]) == streamed_ids
    fresh = LLM(new, **OPTIONS)
    rest = SamplingParams(max_tokens=5, ignore_eos=True)
    [wanted] = fresh.generate([[*output.prompt_token_ids, *streamed_ids]], rest)
    assert output.token_ids[3:] == wanted.token_ids
    assert_idle(llm)


def test_weights_of_another_model_are_refused(old: Path, tmp_path: Path) -> None:
    """A refused reload leaves the path and the answers unchanged."""
    wanted = answers(old)
    llm = LLM(old, **OPTIONS)
    other = write_tiny_checkpoint(tmp_path / "other", "llama", num_hidden_layers=2)

    with pytest.raises(ModelError, match="num_layers is 2 and not 3"):
        llm.reload_weights(other)
    with pytest.raises(CheckpointError):
        llm.reload_weights(tmp_path / "nothing")
    (other / "model.safetensors").write_bytes(b"no weights")
    (other / "config.json").write_bytes((old / "config.json").read_bytes())
    with pytest.raises(CheckpointError):
        llm.reload_weights(other)
    with pytest.raises(ConfigError, match="running='now'"):
        llm.reload_weights(old, running="now")  # type: ignore[arg-type]

    assert llm.engine.path == old
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == wanted


def test_a_server_sends_away_who_would_wait_too_long(old: Path) -> None:
    """`max_waiting` is 1024 by default, and 0 is refused."""
    llm = AsyncLLM(old, **OPTIONS)
    assert llm.config.requested.scheduler.max_waiting == 1024
    with pytest.raises(ConfigError, match="max_waiting=0"):
        AsyncLLM(old, max_waiting=0)


def test_streams_of_an_engine_in_a_thread_are_those_of_llm(old: Path, new: Path) -> None:
    """`AsyncLLM` gives the answers of `LLM` for texts and chats, also after a reload."""
    wanted, changed = answers(old), answers(new)
    llm = AsyncLLM(old, **OPTIONS)
    talk = [{"role": "user", "content": "hello"}]
    [said] = LLM(old, **OPTIONS).chat(talk, PARAMS)

    async def main() -> None:
        async with llm:
            outputs = await asyncio.gather(*(llm.generate(prompt, PARAMS) for prompt in PROMPTS))
            assert [output.token_ids for output in outputs] == wanted
            text = ""
            async for event in llm.stream_chat(talk, PARAMS):
                text += event.text
            assert text == said.text == (await llm.chat(talk, PARAMS)).text
            assert (await llm.cache.explain(PROMPTS[0])).hit_tokens > 0
            cleared = await llm.cache.clear(prefix=talk)
            assert cleared.num_pages > 0
            running = asyncio.create_task(llm.generate(PROMPTS[0], PARAMS))
            await llm.reload_weights(new)
            assert (await llm.generate(PROMPTS[1], PARAMS)).token_ids == changed[1]
            await running

    asyncio.run(main())


def test_a_format_is_compiled_while_the_engine_goes_on(old: Path) -> None:
    """A grammar is compiled outside the engine's thread and delays no other request."""
    pytest.importorskip("llguidance", reason="llguidance is missing: the extra 'structured'")
    llm = AsyncLLM(old, **OPTIONS)
    spec = StructuredOutput(choice=("the rain", "the north"))
    held = threading.Event()

    async def main() -> None:
        async with llm:
            stopped = asyncio.create_task(llm.run(lambda core: held.wait(30)))
            answer_task = asyncio.create_task(llm.generate("who", SamplingParams(structured=spec)))
            formats = llm.engine.grammar_compiler
            assert formats is not None
            while not formats._cache.get("", spec):
                assert not stopped.done()
                await asyncio.sleep(0.01)
            held.set()
            assert (await answer_task).text in ("the rain", "the north")
            with pytest.raises(InvalidParamsError, match="regex"):
                await llm.generate("who", SamplingParams(structured=StructuredOutput(regex="(")))

    asyncio.run(main())
