"""Tokens that are added by a tokenizer's other files get the ids that transformers gives."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import CheckpointError

transformers = pytest.importorskip("transformers", reason="the oracle")

NAMES = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<x>", "[MASK]", "foo", "<tool>"]
PIECES = ["hello", " ", "world ", " foo", "bar"]
ROLES = ["bos_token", "eos_token", "pad_token", "unk_token", "mask_token", "image_token"]
LISTS = ["additional_special_tokens", "extra_special_tokens"]
WORDS = ["▁hello", "▁world", "▁foo", "hello", "bar", "</s>"]


def flags(draw: Random) -> dict[str, bool]:
    names = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return {name: draw.random() < 0.3 for name in names}


def base(draw: Random) -> tokenizers.Tokenizer:
    """Build a byte-level BPE, or a Unigram with a special token's text as a piece."""
    if draw.random() < 0.5:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        model = models.BPE({sign: number for number, sign in enumerate(alphabet)}, [])
        core = tokenizers.Tokenizer(model)
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    else:
        signs = sorted({*"".join(NAMES + PIECES), "▁"} - {" "})
        pieces = ["<unk>", *WORDS, *signs]
        scores = [0.0, *[-2.0] * len(WORDS), *[-6.0] * len(signs)]
        core = tokenizers.Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), 0))
        core.pre_tokenizer = pre_tokenizers.Metaspace()
        core.decoder = decoders.Metaspace()
    for name in draw.sample(NAMES, draw.randint(0, 3)):
        core.add_tokens([tokenizers.AddedToken(name, **flags(draw))])
    return core


def write(path: Path, draw: Random) -> None:
    """Write a tokenizer whose files name added tokens in every supported way."""
    core = base(draw)
    core.save(str(path / "tokenizer.json"))
    count = core.get_vocab_size()

    def ids(names: list[str]) -> dict[str, int | None]:
        fresh = [name for name in names if core.token_to_id(name) is None]
        return {
            name: count + fresh.index(name) if name in fresh else core.token_to_id(name)
            for name in names
        }

    def token(name: str) -> Any:
        if draw.random() < 0.6:
            return name
        entry = {key: value for key, value in flags(draw).items() if key != "special"}
        return {"content": name, "__type": "AddedToken", **entry}

    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    some = draw.sample(NAMES, draw.randint(0, 3))
    older = draw.random() < 0.6
    if not older:
        known = [added_token.content for added_token in core.get_added_tokens_decoder().values()]
        if draw.random() < 0.2:
            known = known[1:]
        entries = ids(list(dict.fromkeys([*known, *some])))
        config["added_tokens_decoder"] = {
            str(number): {"content": name, **flags(draw)} for name, number in entries.items()
        }
    elif draw.random() < 0.5:
        (path / "added_tokens.json").write_text(json.dumps(ids(some)))
    for role in ROLES:
        if draw.random() < 0.4:
            name = draw.choice(NAMES)
            config[role] = name if role == "image_token" else token(name)
    for name in LISTS:
        if draw.random() < 0.3:
            config[name] = draw.sample(NAMES, draw.randint(1, 3))
    if "extra_special_tokens" in config and draw.random() < 0.2:
        config["extra_special_tokens"] = {"image": draw.choice(NAMES), "sound": draw.choice(NAMES)}
    for name in ("add_bos_token", "add_eos_token"):
        if draw.random() < 0.3:
            config[name] = draw.random() < 0.7
    if older and draw.random() < 0.4:
        named: dict[str, Any]
        named = {role: draw.choice(NAMES) for role in ROLES[:2] if draw.random() < 0.5}
        for name in LISTS:
            if draw.random() < 0.2:
                named[name] = draw.sample(NAMES, draw.randint(1, 3))
        (path / "special_tokens_map.json").write_text(json.dumps(named))
    (path / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("seed", range(60))
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, seed: int) -> None:
    """Ids, special tokens and decoded texts equal those of transformers."""
    draw = Random(seed)
    write(tmp_path, draw)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)

    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.vocab_size == len(theirs)
    for _ in range(12):
        text = "".join(draw.choice(NAMES + PIECES) for _ in range(draw.randint(1, 7)))
        ids = theirs.encode(text, add_special_tokens=False)

        assert list(ours.encode(text, add_special_tokens=False)) == ids, text
        assert list(ours.encode(text)) == theirs.encode(text), text
        options = {"clean_up_tokenization_spaces": False}
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, **options), text


def test_nobody_writes_a_special_token_that_only_the_configuration_names(tmp_path: Path) -> None:
    """A special token from tokenizer_config.json alone is escaped in user text."""
    base(Random(0)).save(str(tmp_path / "tokenizer.json"))
    entry = {"content": "<|end|>", "special": True}
    added = {"added_tokens_decoder": {"300": entry}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    tokenizer = Tokenizer.load(tmp_path)
    (end,) = tokenizer.encode("<|end|>")

    assert end in tokenizer.special_token_ids
    assert end not in tokenizer.encode_with_offsets(tokenizer.escape_special_tokens("a<|end|>b"))[0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config", {"added_tokens_decoder": ["<x>"]}, "must be an object"),
        ("tokenizer_config", {"added_tokens_decoder": {"first": {"content": "<x>"}}}, "first"),
        ("tokenizer_config", {"added_tokens_decoder": {"300": {"contents": "<x>"}}}, "is no token"),
        ("tokenizer_config", {"eos_token": {"id": 3}}, "is no token"),
        ("tokenizer_config", {"eos_token": {"content": "<x>", "lstrip": "false"}}, "nor false"),
        ("tokenizer_config", {"additional_special_tokens": [7]}, "7 is no token"),
        ("tokenizer_config", {"additional_special_tokens": 7}, "must be a list"),
        ("tokenizer_config", {"additional_special_tokens": "<abc>"}, "must be a list"),
        ("special_tokens_map", {"extra_special_tokens": 7}, "must be a list"),
        ("added_tokens", {"<x>": "256"}, "must be a number"),
        ("added_tokens", {"<x>": None, "<y>": 3}, "must be a number"),
    ],
)
def test_what_is_no_token_is_told(tmp_path: Path, name: str, content: Any, message: str) -> None:
    """An invalid added token raises CheckpointError with the reason."""
    base(Random(1)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / f"{name}.json").write_text(json.dumps(content))

    with pytest.raises(CheckpointError, match=rf"{tmp_path}.* cannot be added: .*{message}"):
        Tokenizer.load(tmp_path)


def test_an_older_file_beside_entries_is_read_as_carefully(tmp_path: Path) -> None:
    """special_tokens_map.json supplies the EOS token, and its entries are validated."""
    base(Random(1)).save(str(tmp_path / "tokenizer.json"))
    newer, older = tmp_path / "tokenizer_config.json", tmp_path / "special_tokens_map.json"
    newer.write_text(json.dumps({"added_tokens_decoder": {"300": {"content": "<end>"}}}))
    older.write_text(json.dumps({"eos_token": "<end>"}))
    assert len(Tokenizer.load(tmp_path).eos_token_ids) == 1

    older.write_text(json.dumps({"eos_token": {"id": 3}}))
    with pytest.raises(CheckpointError, match="is no token"):
        Tokenizer.load(tmp_path)


def test_files_that_are_too_deep_are_told(tmp_path: Path) -> None:
    """JSON nested deeper than the parser can go raises CheckpointError."""
    base(Random(1)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "added_tokens.json").write_text("[" * 200_000)

    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.load(tmp_path)


def test_an_id_that_a_token_cannot_have_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A token with an impossible id gets the next free id, and a warning is logged."""
    base(Random(0)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|far|>": 5000}))

    tokenizer = Tokenizer.load(tmp_path)

    assert tokenizer.encode("<|far|>")[0] < 5000
    assert "the tokenizer's files say 5000" in caplog.text
