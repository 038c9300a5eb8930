"""Tokenizers of other formats than tokenizer.json: the reference libraries' ids, or one line of why not."""

import base64
import contextlib
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify import LLM, SamplingParams
from ramify.engine.text.ranked_bpe import LLAMA3_PATTERN
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import CheckpointError
from ramify.testing import write_tiny_checkpoint
from tests.budget import examples

TEXTS = [
    "Hello there, world 123", "  two  spaces\n\nand lines", "naïve café – ünïcode 漢字 🙂", "", " ",
    "a", " leading", "trailing ", "tab\there", "\x00\x7f", "ﬁ Ａ１ …", "<mark>hi\n<mark>  x\n\n\ny",
    "\u2581x",
]  # fmt: skip
CORPUS = [
    "Hello there, world 123", "the quick brown fox jumps over the lazy dog", "two  spaces and lines",
    "Hello world hello there", "other words there and then", "numbers 1 2 3 45 678",
] * 20  # fmt: skip
IDENTITY = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}
# Settings of sentencepiece's trainer: those of Llama's, of Gemma's, and what others may have.
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 360, "model_type": "bpe", "byte_fallback": True, **IDENTITY},
    "gemma": {
        "vocab_size": 380,
        "model_type": "bpe",
        "byte_fallback": True,
        **IDENTITY,
        "add_dummy_prefix": False,
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "pad_piece": "<pad>",
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
        "user_defined_symbols": ["<mark>", "\n", "\n\n", "\t", "\u2581\u2581"],
    },
    "unigram": {"vocab_size": 60, "model_type": "unigram", "hard_vocab_limit": False},
    "unigram with bytes": {
        "vocab_size": 310,
        "model_type": "unigram",
        "hard_vocab_limit": False,
        "byte_fallback": True,
    },
    "normalizing": {"vocab_size": 90, "model_type": "bpe"},
}
of_each_kind = pytest.mark.parametrize("kind", SETTINGS)


@cache
def trained(kind: str) -> bytes:
    """A small model of sentencepiece's trainer."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="the reference, of the extra dev")
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=file, minloglevel=2, **SETTINGS[kind]
    )
    return file.getvalue()


@cache
def ranks() -> dict[bytes, int]:
    """Ranks that tiktoken's own trainer learns."""
    educational = pytest.importorskip("tiktoken._educational", reason="the reference, of dev")
    learned: dict[bytes, int] = educational.bpe_train(
        data=" ".join(CORPUS), vocab_size=320, pat_str=LLAMA3_PATTERN, visualise=None
    )
    return learned


def load(path: Path, name: str, data: bytes, **files: Any) -> Tokenizer:
    """The tokenizer of a folder with this file, and JSON files beside it."""
    (path / name).write_bytes(data)
    for stem, content in files.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    return Tokenizer.load(path)


@of_each_kind
@settings(max_examples=examples(40), deadline=None)
@given(texts=st.lists(st.text("helo wrd \nt1é漢🙂\t", max_size=40), max_size=4))
def test_a_sentencepiece_model_has_its_ids(
    kind: str, tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    """Leading spaces, bytes, unknown characters, user-defined symbols: as sentencepiece, both ways."""
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained(kind))
    ours = load(tmp_path_factory.mktemp("model"), "tokenizer.model", trained(kind))

    for text in (*TEXTS, *texts):
        ids = theirs.encode(text)
        assert list(ours.encode(text, add_special_tokens=False)) == ids, text
        if theirs.unk_id() not in ids:  # which sentencepiece writes as a sign
            assert ours.decode(ids) == theirs.decode(ids)
    assert ours.vocab_size == theirs.get_piece_size()


@of_each_kind
def test_a_sentencepiece_model_names_its_special_tokens(kind: str, tmp_path: Path) -> None:
    """Without any other file: the begin is added, the end is known, and both are skipped in texts."""
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained(kind))

    ours = load(tmp_path, "tokenizer.model", trained(kind))

    begin, end = theirs.bos_id(), theirs.eos_id()
    assert list(ours.encode("Hello")) == [begin, *theirs.encode("Hello")]
    assert ours.eos_token_ids == (end,)
    assert ours.special_tokens["bos_token"] == theirs.id_to_piece(begin)
    assert ours.decode([begin, *theirs.encode("Hello"), end]) == "Hello"
    # In a prompt, the text of a special token is that token; `escape_special_tokens` is for users.
    assert list(ours.encode(f"{theirs.id_to_piece(end)}", False))[-1] == end


def test_the_config_says_what_is_added(tmp_path: Path) -> None:
    """add_bos_token, add_eos_token, legacy, and texts for ids that were held free."""
    config = {
        "add_bos_token": False,
        "add_eos_token": True,
        "legacy": False,
        "added_tokens_decoder": {
            "300": {"content": "<|im_start|>", "special": True},
            "360": {"content": "<|new|>", "special": True},
        },
    }
    ours = load(tmp_path, "tokenizer.model", trained("llama"), tokenizer_config=config)

    plain = list(ours.encode("Hello", False))
    assert list(ours.encode("Hello")) == [*plain, 2]
    assert list(ours.encode("<|im_start|>", False))[-1] == 300
    assert list(ours.encode("<|new|>", False))[-1] == 360
    # Not legacy: no space after a special token.
    assert list(ours.encode("Hello</s>Hello", False)) != [*plain, 2, *plain]
    assert ours.decode(list(ours.encode("Hello</s>Hello", False))) == "HelloHello"


def test_a_byte_that_is_no_text_becomes_a_replacement_character(tmp_path: Path) -> None:
    """Ids of single bytes decode to what they are, together, and to U+FFFD where they are half."""
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained("llama"))
    ours = load(tmp_path, "tokenizer.model", trained("llama"))

    ids = theirs.encode("é")
    assert ours.decode(ids) == "é"
    assert "\ufffd" in ours.decode(ids[:-1])


def tekken(**config: Any) -> bytes:
    """A tekken.json with the ranks of tiktoken's trainer."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks().items()
    ]
    content = {
        "config": {
            "pattern": LLAMA3_PATTERN,
            "num_vocab_tokens": len(vocabulary),
            "default_vocab_size": 300 + 8,
            "default_num_special_tokens": 8,
            "version": "v13",
            **config,
        },
        "vocab": vocabulary,
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(special)
        ],
    }
    return json.dumps(content).encode()


def reference(num_tokens: int) -> Any:
    import tiktoken

    kept = {token: rank for token, rank in ranks().items() if rank < num_tokens}
    return tiktoken.Encoding("t", pat_str=LLAMA3_PATTERN, mergeable_ranks=kept, special_tokens={})


def test_a_tekken_file_has_tiktokens_ids_after_its_special_tokens(tmp_path: Path) -> None:
    """mistral-common encodes with tiktoken, and puts the special tokens first."""
    theirs = reference(300)

    ours = load(tmp_path, "tekken.json", tekken())

    for text in TEXTS:
        ids = [8 + id_ for id_ in theirs.encode(text)]
        assert list(ours.encode(text, add_special_tokens=False)) == ids, text
        assert ours.decode(ids) == text
    assert list(ours.encode("a")) == [1, *ours.encode("a", False)]
    assert ours.eos_token_ids == (2,)
    assert list(ours.encode("[INST]", False)) == [3]
    assert list(ours.encode("<SPECIAL_7>", False)) == [7]
    assert ours.vocab_size == 308
    assert ours.decode([8 + 0xC3]) == "\ufffd"


@settings(max_examples=examples(40), deadline=None)
@given(text=st.text("helo wrd \nt1é漢🙂\t'", max_size=60))
def test_a_model_in_tiktokens_form_has_its_ids(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    """Llama 3's tokenizer.model, with the special tokens of tokenizer_config.json behind it."""
    theirs = reference(320)
    lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks().items()]
    config = {"added_tokens_decoder": {"320": {"content": "<|eot|>", "special": True}}}

    ours = load(
        tmp_path_factory.mktemp("model"), "tokenizer.model", b"\n".join(lines),
        config={"model_type": "llama"}, tokenizer_config={**config, "eos_token": "<|eot|>"},
    )  # fmt: skip

    for some in (text, *TEXTS):
        assert list(ours.encode(some)) == theirs.encode(some), some
        assert ours.decode(theirs.encode(some)) == some
    assert ours.eos_token_ids == (320,)


def write_bpe(path: Path) -> Any:
    """A byte-level BPE in the form of GPT-2: vocab.json and merges.txt."""
    transformers = pytest.importorskip("transformers", reason="conversion needs ramify[hf]")
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
    path = write_tiny_checkpoint(tmp_path, "llama", tokenizer=False, vocab_size=400)
    (path / "tokenizer.model").write_bytes(trained("llama"))

    [output] = LLM(str(path)).generate(["Hello world"], SamplingParams(max_tokens=2))

    assert len(output.prompt_token_ids) > 2
    assert output.prompt == "Hello world"


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary in text needs transformers: one line says what to install."""
    write_bpe(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)

    with pytest.raises(CheckpointError, match=r"pip install 'ramify\[hf\]'") as caught:
        Tokenizer.load(tmp_path)

    assert "vocab.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["tokenizer.model", "tekken.json", "qwen.tiktoken", "vocab.json"])
@pytest.mark.parametrize(
    "content", [b"", b"\x00nonsense", b"{}", b"[1]", b"YQ== x\n", b"\xff" * 99]
)
def test_a_damaged_file_is_one_line(file: str, content: bytes, tmp_path: Path) -> None:
    """With the file and what to do."""
    (tmp_path / file).write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))

    with pytest.raises(CheckpointError, match="give prompts as token ids") as caught:
        Tokenizer.load(tmp_path)

    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_a_model_that_is_cut_or_changed_is_no_crash(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every byte string is a model or a CheckpointError."""
    model = bytearray(trained(data.draw(st.sampled_from(["gemma", "unigram", "normalizing"]))))
    for _ in range(data.draw(st.integers(0, 3))):
        model[data.draw(st.integers(0, len(model) - 1))] = data.draw(st.integers(0, 255))
    model = model[: data.draw(st.integers(0, len(model)))]

    with contextlib.suppress(CheckpointError):
        load(tmp_path_factory.mktemp("model"), "tokenizer.model", bytes(model)).encode("Hello")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"special_tokens": None}, "does not name its special tokens"),
        ({"vocab": []}, "no token for the byte 0x00"),
        ({"config": {}}, "pattern"),
    ],
)
def test_an_old_or_empty_tekken_file_says_why(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """The reason is in the line."""
    content = json.loads(tekken()) | change

    with pytest.raises(CheckpointError, match=reason):
        load(tmp_path, "tekken.json", json.dumps(content).encode())


def test_no_tokenizer_at_all_names_the_formats(tmp_path: Path) -> None:
    """The error lists what was looked for."""
    with pytest.raises(CheckpointError, match=r"tokenizer\.model.*tekken\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_an_optional_file_that_cannot_be_read_is_one_line(file: str, tmp_path: Path) -> None:
    """A link to itself is not a missing file."""
    write_tiny_checkpoint(tmp_path, "llama")
    (tmp_path / file).unlink(missing_ok=True)
    (tmp_path / file).symlink_to(file)

    with pytest.raises(CheckpointError, match=rf"{file} cannot be read"):
        Tokenizer.load(tmp_path)
