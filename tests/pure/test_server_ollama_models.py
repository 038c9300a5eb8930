"""What Ollama's API says of the model: names, list, template, sizes, limits; and vectors of texts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ramify.engine.text.tokenizer import Tokenizer
from ramify.models.configs.fields import read_json
from ramify.server.ollama.checkpoint_facts import CheckpointFacts, read_facts
from ramify.server.ollama.endpoints import RUNNING
from tests.pure.server_bench import TINY, TOOL_TEMPLATE, Answer, ServerBench, ask, run
from tests.pure.test_server_ollama import CHAT, GENERATE, WARNING, body


@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
@pytest.mark.parametrize("path", [CHAT, "/v1/chat/completions"])
def test_a_name_may_have_the_tag(path: str, name: str) -> None:
    """In any API; the answer names the model as the request did."""
    assert ask(path, body(max_tokens=4) | {"model": name}).json["model"] == name


@pytest.mark.parametrize(
    ("path", "request_"), [(CHAT, {"messages": []}), (CHAT, {}), (GENERATE, {"prompt": ""})]
)
def test_a_request_without_a_prompt_finds_the_model_loaded(path: str, request_: Any) -> None:
    """Clients load a model so; they cannot unload it."""
    loaded = ask(path, {"model": "tiny"} | request_)
    unloaded = ask(path, {"model": "tiny", "keep_alive": 0} | request_)

    assert (loaded.json["done"], loaded.json["done_reason"]) == (True, "load")
    assert WARNING not in loaded.headers
    assert "keep_alive" in unloaded.headers[WARNING]


@pytest.mark.parametrize(
    ("keep_alive", "unloads"),
    [
        *((form, True) for form in (0, 0.0, "0", "0m", "0h0.0s", "-0s")),
        *((form, False) for form in (None, -1, 300, "5m", "-1m", "1h0m")),
    ],
)
def test_a_model_cannot_be_unloaded(keep_alive: object, unloads: bool) -> None:
    """`keep_alive: 0` in any form of Ollama's is warned of; others change nothing, below 0 is for ever."""
    loaded = ask(CHAT, {"model": "tiny", "messages": [], "keep_alive": keep_alive})

    assert loaded.json["done_reason"] == "load"
    assert (WARNING in loaded.headers) == unloads


@pytest.mark.parametrize("num_predict", [-1, -2, -64])
def test_below_zero_there_is_no_limit(num_predict: int) -> None:
    """Ollama says -1 and -2, and treats other numbers alike: the answer ends with the context."""
    answer = ask(CHAT, body(options={"num_predict": num_predict}), max_model_len=64)

    assert answer.json["done_reason"] == "length"
    assert answer.json["prompt_eval_count"] + answer.json["eval_count"] == 64


def get(path: str, **options: Any) -> Answer:
    bench = ServerBench(**options)

    async def main() -> Answer:
        async with bench.running():
            return await bench.call("GET", path)

    return run(main())


def test_the_model_is_listed_under_each_of_its_names() -> None:
    """With one digest; names get the tag that clients look for."""
    listed = get("/api/tags", aliases=["other", "with:tag", "*"]).json["models"]
    running = get("/api/ps").json["models"]

    assert [model["name"] for model in listed] == ["tiny:latest", "other:latest", "with:tag"]
    assert len({model["digest"] for model in listed}) == 1
    assert running[0]["context_length"] == 2048
    for entry in (*listed, *running):
        assert entry["model"] == entry["name"]
        assert len(entry["digest"]) == 64


def test_the_model_is_described() -> None:
    """Template, context length under the name of its architecture, capabilities."""
    plain = ask("/api/show", {"model": "tiny"}).json
    able = ask("/api/show", {"name": "tiny:latest"}, chat_template=TOOL_TEMPLATE).json

    info = plain["model_info"]
    assert info[f"{info['general.architecture']}.context_length"] == 2048
    assert plain["capabilities"] == ["completion"]
    assert able["capabilities"] == ["completion", "tools", "thinking"]
    assert able["template"] == TOOL_TEMPLATE


def test_embeddings_are_those_of_openais_api() -> None:
    """Of length 1; an input that is too long is cut unless the request forbids it."""
    inputs = ["a b", "c"]
    ours = ask("/api/embed", {"model": "tiny", "input": inputs}).json
    openais = ask("/v1/embeddings", {"model": "tiny", "input": inputs}).json
    single = ask("/api/embeddings", {"model": "tiny", "prompt": "c"}).json
    long = {"model": "tiny", "input": "Q z " * 3000}

    assert ours["embeddings"] == [item["embedding"] for item in openais["data"]]
    assert ours["prompt_eval_count"] == openais["usage"]["prompt_tokens"]
    assert single["embedding"] == ours["embeddings"][1]
    assert ask("/api/embed", long).json["prompt_eval_count"] == 2047
    assert ask("/api/embed", long | {"truncate": False}).status == 400
    assert ask("/api/embed", {"model": "tiny", "input": []}).json["embeddings"] == []


def test_a_cut_input_has_the_special_token_at_its_end(tmp_path: Path) -> None:
    """Of a tokenizer that writes one there: the vector of the last token is its own."""
    content = json.loads((TINY / "tokenizer.json").read_text())
    sequence = [{"Sequence": {"id": "A", "type_id": 0}}]
    end = {"id": "<|end|>", "ids": [2], "tokens": ["<|end|>"]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*sequence, {"SpecialToken": {"id": "<|end|>", "type_id": 0}}],
        "pair": [*sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": end},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    shutil.copy(TINY / "tokenizer_config.json", tmp_path)
    bench = ServerBench(tokenizer=Tokenizer.load(tmp_path))

    async def main() -> None:
        async with bench.running():
            await bench.post("/api/embed", {"model": "tiny", "input": ["Q z " * 3000, "Q z"]})

    run(main())
    long, short = (ended.request.prompt.ids.tolist() for ended in bench.ended)
    assert len(long) == 2047
    assert long[-2:] == [long[-2], 2] and 2 not in long[:-1]
    assert short[-1] == 2


def test_a_long_input_without_tokens_is_refused(tmp_path: Path) -> None:
    """As a short one is: of a tokenizer that drops white space, blanks leave nothing."""
    content = json.loads((TINY / "tokenizer.json").read_text())
    strip = {"type": "Strip", "strip_left": True, "strip_right": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"normalizer": strip}))
    shutil.copy(TINY / "tokenizer_config.json", tmp_path)

    async def main() -> list[int]:
        async with ServerBench(tokenizer=Tokenizer.load(tmp_path)).running() as bench:
            return [
                (await bench.post("/api/embed", {"model": "tiny", "input": text})).status
                for text in (" ", " " * 9000)
            ]

    assert run(main()) == [400, 400]


def test_probes_see_an_ollama() -> None:
    """The text at the root, and a version that is recent enough for clients that ask for a least one."""
    root, version = get("/"), get("/api/version").json

    assert root.body.decode() == RUNNING
    assert tuple(map(int, version["version"].split("."))) >= (0, 12, 11)
    assert version["ramify"]


def test_the_files_of_a_checkpoint_are_read() -> None:
    """Architecture, sizes, number and type of the weights."""
    config, facts = read_json(TINY / "config.json"), read_facts(TINY)

    assert (facts.architecture, facts.form, facts.weight_type) == ("llama", "safetensors", "F32")
    assert ("block_count", config["num_hidden_layers"]) in facts.dimensions
    assert facts.num_bytes == (TINY / "model.safetensors").stat().st_size
    assert 4 * facts.num_parameters == pytest.approx(facts.num_bytes, rel=0.01)


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]"])
def test_files_that_cannot_be_read_are_no_error(tmp_path: Path, content: bytes | None) -> None:
    """The model may be on another machine; the defaults stand for what is not known."""
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)

    facts = read_facts(tmp_path)

    assert facts.architecture == CheckpointFacts().architecture == "ramify"
    assert facts.num_parameters == 0
