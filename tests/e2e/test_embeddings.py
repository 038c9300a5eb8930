"""Embeddings of a checkpoint in the shape of Qwen3-Embedding, through OpenAI's client."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from safetensors.torch import save_file

from ramify import LLM
from ramify.models.checkpoint.find import find_checkpoint
from ramify.models.configs.model_config import ModelConfig
from tests.e2e.conftest import Running, Start

QUERY = "Instruct: Given a search query, retrieve passages that answer it\nQuery:"
TEXTS = ["Who lives in Rome?", "Anna lives in Rome, and has done so for years.", "Paris is large."]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, named as a base model's, no head; texts end with <|end|>; last-token pooling."""
    path = tmp_path_factory.mktemp("model") / "embedder"
    path.mkdir()
    tiny = find_checkpoint("ramify-tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    [end] = [token for token in tokenizer["added_tokens"] if token["content"] == "<|end|>"]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [end["id"]], "tokens": ["<|end|>"]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": json.loads((tiny / "config.json").read_text())["vocab_size"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "eos_token_id": end["id"],
    }
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name.removeprefix("model."): torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in ModelConfig.from_hf(config, "config.json").tensor_shapes().items()
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.{kind}"}
        for index, (kind, folder) in enumerate(kinds.items())
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    flags = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(flags | {"include_prompt": True}))
    prompts = {"prompts": {"query": QUERY, "document": ""}, "default_prompt_name": None}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return path


@pytest.fixture(scope="module")
def embedder(start: Start, checkpoint: Path) -> Running:
    return start("--dtype", "float32", model=str(checkpoint))


def test_vectors_are_those_of_llm_embed(embedder: Running, checkpoint: Path) -> None:
    """Texts, token ids and a named prompt; as base64 (the client's default) and as numbers."""
    client = embedder.openai()
    llm = LLM(str(checkpoint), dtype="float32", kv_cache_tokens=2048)
    assert llm.tokenizer is not None
    ids = [list(llm.tokenizer.encode(text)) for text in TEXTS]
    expected = llm.embed(TEXTS)

    texts = client.embeddings.create(model="embedder", input=TEXTS)
    numbers = client.embeddings.create(model="embedder", input=ids, encoding_format="float")
    [query] = client.embeddings.create(
        model="embedder", input=TEXTS[0], extra_body={"prompt_name": "query"}
    ).data

    for answer in (texts, numbers):
        assert [item.index for item in answer.data] == [0, 1, 2]
        vectors = np.array([item.embedding for item in answer.data], np.float32)
        assert vectors.tobytes() == expected.tobytes()
    assert texts.usage.prompt_tokens == texts.usage.total_tokens == sum(map(len, ids))
    assert np.array(query.embedding, np.float32).tobytes() == (
        llm.embed(QUERY + TEXTS[0]).tobytes()
    )
    assert all(tokens[-1] == llm.tokenizer.eos_token_ids[0] for tokens in ids)


def test_dimensions_cut_and_scale(embedder: Running) -> None:
    """The first elements with length 1; more than there are is a BadRequestError."""
    client = embedder.openai()
    [whole] = client.embeddings.create(model="embedder", input="Rome").data
    [short] = client.embeddings.create(model="embedder", input="Rome", dimensions=16).data

    first = np.array(whole.embedding[:16])
    assert np.array(short.embedding) == pytest.approx(first / np.linalg.norm(first), abs=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions is 65; this model has 64"):
        client.embeddings.create(model="embedder", input="Rome", dimensions=65)


def test_a_shared_prefix_is_read_from_the_cache(embedder: Running) -> None:
    """The same vector, and the pages before the last token are not computed again."""
    client, text = embedder.openai(), " ".join(TEXTS * 8)

    cold, warm = (
        client.embeddings.with_raw_response.create(model="embedder", input=text) for _ in range(2)
    )

    assert cold.headers["X-Cache"].startswith("MISS")
    assert warm.headers["X-Cache"].startswith("HIT")
    assert cold.parse().data[0].embedding == warm.parse().data[0].embedding


def test_the_async_client(embedder: Running) -> None:
    """Many at once get the vectors of one by one."""
    import asyncio

    async def main() -> list[list[float]]:
        async with openai.AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *(client.embeddings.create(model="embedder", input=text) for text in TEXTS)
            )
            return [answer.data[0].embedding for answer in answers]

    one_by_one = embedder.openai().embeddings.create(model="embedder", input=TEXTS)

    assert asyncio.run(main()) == [item.embedding for item in one_by_one.data]
