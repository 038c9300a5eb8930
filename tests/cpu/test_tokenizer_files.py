"""Tokenizers of other formats than tokenizer.json: converted, or one line that says what is missing."""

import json
from pathlib import Path
from typing import Any

import pytest

from ramify import LLM, SamplingParams
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import CheckpointError
from ramify.testing import write_tiny_checkpoint

transformers = pytest.importorskip("transformers", reason="conversion needs the extra ramify[hf]")

TEXTS = ["Hello there, world 123", "  two  spaces\n\nand lines", "naïve café – ünïcode 漢字 🙂", ""]


def write_bpe(path: Path) -> Any:
    """A byte-level BPE in the form of GPT-2: vocab.json and merges.txt."""
    from tokenizers.pre_tokenizers import ByteLevel

    symbols = sorted(ByteLevel.alphabet())
    merges = ["H e", "l l", "He ll", "Hell o", "Ġ w", "o r"]
    pieces = [*symbols, *("".join(merge.split()) for merge in merges), "<|endoftext|>"]
    path.mkdir(parents=True, exist_ok=True)
    (path / "vocab.json").write_text(json.dumps({piece: n for n, piece in enumerate(pieces)}))
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    return transformers.AutoTokenizer.from_pretrained(path)


def test_vocabulary_and_merges_are_converted(tmp_path: Path) -> None:
    """Ids and texts are those of transformers."""
    theirs = write_bpe(tmp_path)

    tokenizer = Tokenizer.load(tmp_path)

    for text in TEXTS:
        assert list(tokenizer.encode(text)) == theirs(text)["input_ids"]


def test_an_engine_converts_the_tokenizer_of_its_checkpoint(tmp_path: Path) -> None:
    """Prompts are texts although there is no tokenizer.json."""
    path = write_tiny_checkpoint(tmp_path, "llama", tokenizer=False, vocab_size=300)
    write_bpe(path)

    [output] = LLM(str(path)).generate(["Hello world"], SamplingParams(max_tokens=2))

    assert len(output.prompt_token_ids) > 2
    assert output.prompt == "Hello world"


@pytest.mark.parametrize("file", ["tokenizer.model", "tekken.json", "qwen.tiktoken"])
def test_a_damaged_file_says_what_to_install(file: str, tmp_path: Path) -> None:
    """One line with the file, the reason and the packages that its conversion needs."""
    (tmp_path / file).write_bytes(b"\x00nonsense")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))

    with pytest.raises(CheckpointError, match="pip install") as caught:
        Tokenizer.load(tmp_path)

    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_tokenizer_at_all_names_the_formats(tmp_path: Path) -> None:
    """The error lists what was looked for."""
    with pytest.raises(CheckpointError, match=r"tokenizer\.model.*tekken\.json"):
        Tokenizer.load(tmp_path)
