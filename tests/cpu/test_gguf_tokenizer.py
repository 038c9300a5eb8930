"""Tokenizers and chat templates in GGUF files: ids of the reference libraries, or one line of why not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core

from ramify.engine.text.end_tokens import end_token_ids
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.gguf.config import config_fields, end_ids, read_sampling_defaults
from ramify.models.gguf.container import read_container
from tests.budget import examples
from tests.cpu.test_tokenizer_files import CORPUS, TEXTS, trained

gguf = pytest.importorskip("gguf", reason="it writes the files of these tests")

WORDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
SYMBOLS = " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
CASED = (
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+SUFFIX|"
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*SUFFIX"
)
TAIL = " ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Digits(individual_digits=True)


def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*parts, bytes_only])


# What the tokenizer.json of models of that name has: splitting, whether texts are normalised to NFC.
REFERENCES: dict[str, tuple[pre_tokenizers.PreTokenizer, bool]] = {
    "gpt-2": (GPT2, False),
    "smollm": (pre_tokenizers.Sequence([DIGITS, GPT2]), False),
    "starcoder": (pre_tokenizers.Sequence([DIGITS, GPT2]), False),
    "command-r": (pre_tokenizers.Sequence([DIGITS, GPT2]), True),
    "qwen2": (split(f"{WORDS}|\\p{{N}}|{SYMBOLS}"), True),
    "llama-bpe": (split(f"{WORDS}|\\p{{N}}{{1,3}}|{SYMBOLS}"), False),
    "glm4": (split(f"{WORDS}|\\p{{N}}{{1,3}}|{SYMBOLS}"), False),
    "tekken": (split(f"{CASED.replace('SUFFIX', '')}|\\p{{N}}|{TAIL}"), False),
    "gpt-4o": (
        split(CASED.replace("SUFFIX", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + "|\\p{N}{1,3}|" + TAIL),
        False,
    ),
}
CHARS = "aZé漢 \n\r\t'.,!?0123456789<>|İﬁ\u0301_-/\"sSlL"
END = "<|im_end|>"


def byte_level(pre: str) -> Core:
    """A small vocabulary with the splitting of a reference."""
    splitting, normalises = REFERENCES[pre]
    core = Core(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    core.pre_tokenizer = splitting
    if normalises:
        core.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*CORPUS, "I'll we've DON'T 2024 100,000 {x: y}\n\n  z"] * 3, trainer)
    core.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return core


def write(path: Path, model: str | None, arrays: dict[str, Any], **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if model is not None:
        writer.add_string("tokenizer.ggml.model", model)
    for name, values in arrays.items():
        writer.add_array(f"tokenizer.ggml.{name}", list(values))
    for name, value in keys.items():
        full = name.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, list):
            writer.add_array(full, value)
        else:
            writer.add_string(full, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary(core: Core) -> dict[str, list[Any]]:
    """Tokens, types and merges as converters write them, with two ids of padding behind."""
    added = core.get_added_tokens_decoder()
    size = core.get_vocab_size()
    tokens = [core.id_to_token(id_) or "" for id_ in range(size)]
    kinds = [1 if id_ not in added else 3 if added[id_].special else 4 for id_ in range(size)]
    merges = json.loads(core.to_str())["model"]["merges"]
    return {
        "tokens": [*tokens, f"[PAD{size}]", f"[PAD{size + 1}]"],
        "token_type": [*kinds, 5, 5],
        "merges": [" ".join(pair) for pair in merges],
    }


@pytest.fixture(scope="module", params=REFERENCES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A reference, and the tokenizer of its GGUF file."""
    core = byte_level(request.param)
    path = write(
        tmp_path_factory.mktemp("gguf") / "m.gguf",
        "gpt2",
        vocabulary(core),
        tokenizer__ggml__pre=request.param,
        tokenizer__ggml__bos_token_id=1,
    )
    return core, Tokenizer.load(path), request.param


def test_byte_level_vocabularies_have_their_ids(pair: Any) -> None:
    """Words, digits, spaces, special and added tokens; both ways."""
    core, ours, pre = pair
    begin = [1] if pre in ("llama-bpe", "tekken") else []
    for text in [
        *TEXTS,
        *CORPUS[:6],
        f"a{END}\nb <tool>12345 <|im_start|>",
        "I'LL we're 1234567 İ é",
    ]:
        ids = core.encode(text).ids

        assert list(ours.encode(text)) == begin + ids
        assert list(ours.encode_with_offsets(text)[0]) == ids
        assert (
            ours.decode(ids, skip_special_tokens=False) == normalizers.NFC().normalize_str(text)
            or not REFERENCES[pre][1]
        )


@settings(max_examples=examples(100), deadline=None)
@given(text=st.text(alphabet=CHARS, max_size=30) | st.text(max_size=10))
def test_any_text_has_its_ids(pair: Any, text: str) -> None:
    """The reference's ids, whatever the characters."""
    core, ours, _ = pair

    assert list(ours.encode(text, add_special_tokens=False)) == core.encode(text).ids


def sentencepiece_file(kind: str, path: Path, **keys: Any) -> tuple[Any, Path]:
    """A reference, and the GGUF file of its model."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="the reference, of the extra dev")
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained(kind))
    ids = range(theirs.vocab_size())

    def kind_of(id_: int) -> int:
        checks = (theirs.is_unknown, theirs.is_control, theirs.is_unused, theirs.is_byte)
        numbers = (2, 3, 5, 6)
        if kind == "gemma" and theirs.id_to_piece(id_) in ("<mark>", "\n", "\n\n", "\t", "▁▁"):
            return 4
        return next((n for n, check in zip(numbers, checks, strict=True) if check(id_)), 1)

    arrays = {
        "tokens": [theirs.id_to_piece(id_) for id_ in ids],
        "scores": [float(theirs.get_score(id_)) for id_ in ids],
        "token_type": list(map(kind_of, ids)),
    }
    return theirs, write(
        path / "m.gguf",
        "llama",
        arrays,
        tokenizer__ggml__bos_token_id=theirs.bos_id(),
        tokenizer__ggml__eos_token_id=theirs.eos_id(),
        tokenizer__ggml__unknown_token_id=theirs.unk_id(),
        tokenizer__ggml__add_space_prefix=kind == "llama",
        **keys,
    )


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_sentencepiece_vocabularies_have_their_ids(kind: str, tmp_path: Path) -> None:
    """Scores in place of merges, bytes, a space before the text or none; BOS unless the file says no."""
    theirs, path = sentencepiece_file(kind, tmp_path)
    ours = Tokenizer.load(path)
    for text in (*TEXTS, *CORPUS[:6]):
        ids = theirs.encode(text)

        assert list(ours.encode(text, add_special_tokens=False)) == ids
        assert list(ours.encode(text)) == [theirs.bos_id(), *ids]
    assert ours.special_tokens["bos_token"] == theirs.id_to_piece(theirs.bos_id())


def test_a_file_says_which_tokens_are_added(tmp_path: Path) -> None:
    """`add_bos_token` and `add_eos_token`."""
    keys = {"tokenizer__ggml__add_bos_token": False, "tokenizer__ggml__add_eos_token": True}
    theirs, path = sentencepiece_file("llama", tmp_path, **keys)

    assert list(Tokenizer.load(path).encode("a")) == [*theirs.encode("a"), theirs.eos_id()]


def test_chat_templates_by_name(tmp_path: Path) -> None:
    """The default one, and that for tools; its end of a turn ends answers."""
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    core = byte_level("gpt-2")
    path = write(
        tmp_path / "m.gguf",
        "gpt2",
        vocabulary(core),
        tokenizer__ggml__pre="gpt-2",
        tokenizer__ggml__eos_token_id=0,
        tokenizer__chat_template=plain,
        tokenizer__chat_templates=["tool_use"],
        tokenizer__chat_template__tool_use="tools!",
    )
    ours = Tokenizer.load(path)
    messages = [{"role": "user", "content": "hi"}]

    assert ours.apply_chat_template(messages) == "user: hi<|im_end|>"
    tool = {"type": "function", "function": {"name": "f"}}
    assert ours.apply_chat_template(messages, tools=[tool]) == "tools!"
    assert end_token_ids(ours) == (0, 2)


def test_all_ends_are_found(tmp_path: Path) -> None:
    """Those with a role, and control tokens known by name; ids beyond the vocabulary do not count."""
    path = write(
        tmp_path / "m.gguf",
        "gpt2",
        {"tokens": ["a", "<e>", "<t>", "<|im_end|>", "<|eot_id|>"], "token_type": [1, 3, 3, 3, 1]},
        tokenizer__ggml__eos_token_id=1,
        tokenizer__ggml__eot_token_id=2,
        tokenizer__ggml__eom_token_id=77,
    )

    assert end_ids(read_container(path)) == (1, 2, 3)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [(["a", "<|end|>", "<|return|>", "<|call|>"], (2, 3)), (["a", "<|end|>"], (1,))],
)
def test_a_message_that_ends_may_not_end_the_answer(
    tmp_path: Path, tokens: list[str], ends: tuple[int, ...]
) -> None:
    """In gpt-oss another message follows `<|end|>`; in Phi-3 none does."""
    kinds = [1, *[3] * (len(tokens) - 1)]
    path = write(tmp_path / "m.gguf", "gpt2", {"tokens": tokens, "token_type": kinds})

    assert end_ids(read_container(path)) == ends


def test_sampling_defaults_are_read(tmp_path: Path) -> None:
    """`general.sampling` stands for `generation_config.json`."""
    path = write(
        tmp_path / "m.gguf",
        None,
        {},
        general__sampling__temp=0.6,
        general__sampling__top_k=20,
        general__sampling__penalty_repeat=1.1,
    )

    defaults = read_sampling_defaults("auto", path)

    assert (defaults.temperature, defaults.top_k, defaults.repetition_penalty) == (0.6, 20, 1.1)
    assert read_sampling_defaults("none", path).temperature == 1.0


@pytest.mark.parametrize("pre", [None, "future-bpe"])
def test_an_unknown_splitting_is_said_loudly(
    pre: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names it, and texts are split as llama.cpp falls back to."""
    keys = {} if pre is None else {"tokenizer__ggml__pre": pre}
    path = write(tmp_path / "m.gguf", "gpt2", vocabulary(byte_level("gpt-2")), **keys)

    with caplog.at_level(logging.WARNING):
        ours = Tokenizer.load(path)

    assert ours.decode(ours.encode("hello there 123")) == "hello there 123"
    assert ("is missing" if pre is None else "'future-bpe', unknown here") in caplog.text


def test_a_whole_tokenizer_is_taken_as_it_is(tmp_path: Path) -> None:
    """`tokenizer.huggingface.json`."""
    core = byte_level("qwen2")
    path = write(
        tmp_path / "m.gguf",
        "gpt2",
        {"tokens": ["a"], "token_type": [1]},
        tokenizer__huggingface__json=core.to_str(),
    )

    assert list(Tokenizer.load(path).encode("Hello 123")) == core.encode("Hello 123").ids


@pytest.mark.parametrize(
    ("model", "arrays", "error", "message"),
    [
        ("t5", {"tokens": ["a"]}, UnsupportedModelError, "model is 't5'; supported are 'gpt2'"),
        ("gpt2", {}, CheckpointError, "tokens: expected an array of texts, found None"),
        ("gpt2", {"tokens": [1, 2]}, CheckpointError, "tokens: expected an array of texts, found"),
        ("gpt2", {"tokens": ["a", "b", "a"]}, CheckpointError, "found 'a' at 0 and 2"),
        ("gpt2", {"tokens": ["a"]}, CheckpointError, "merges: expected an array of texts"),
        ("gpt2", {"tokens": ["a"], "merges": ["x y"]}, CheckpointError, "cannot be made"),
        ("gpt2", {"tokens": ["a"], "merges": ["xy"]}, CheckpointError, "cannot be made"),
        (
            "gpt2",
            {"tokens": ["a", "b"], "token_type": [1], "merges": ["a b"]},
            CheckpointError,
            "token_type: expected 2 numbers, found 1",
        ),
        ("llama", {"tokens": ["a", "b"], "scores": [1.0]}, CheckpointError, "scores: expected 2"),
    ],
)
def test_a_damaged_vocabulary_is_one_line(
    model: str, arrays: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    """The key, what was expected, what was found; never a panic."""
    path = write(tmp_path / "m.gguf", model, arrays, tokenizer__ggml__pre="gpt-2")

    with pytest.raises(error, match=message) as caught:
        Tokenizer.load(path)

    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError):
        config_fields(read_container(path))
