"""Byte-level BPE by ranks: Mistral's `tekken.json`, and files in tiktoken's form."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

# How Llama 3 splits texts into words; tiktoken's files do not say it.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def tekken_tokenizer(text: str) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a `tekken.json`, and its special tokens by role.

    Special tokens have the first ids, `default_num_special_tokens` of them.

    Raises:
        ValueError: it is malformed, or an old file that does not name its special tokens.
    """
    content = json.loads(text)
    config = content["config"]
    named = content.get("special_tokens")
    if not named:
        raise ValueError("it is an old file that does not name its special tokens")
    texts = {int(entry["rank"]): str(entry["token_str"]) for entry in named}
    num_special = int(config.get("default_num_special_tokens") or len(texts))
    special = [texts.get(rank, f"<SPECIAL_{rank}>") for rank in range(num_special)]
    if len(texts) > num_special or max(texts) >= num_special:
        raise ValueError(f"it names {len(texts)} special tokens, of {num_special}")
    size = config.get("default_vocab_size")
    entries = content["vocab"][: None if size is None else int(size) - num_special]
    ranks = {base64.b64decode(entry["token_bytes"]): rank for rank, entry in enumerate(entries)}
    tokenizer = _tokenizer(ranks, config["pattern"], special)
    roles = {role: token for role, token in TEKKEN_ROLES.items() if token in special}
    if "bos_token" in roles:
        bos = roles["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, special.index(bos))]
        )
    return tokenizer, roles


def tiktoken_tokenizer(data: bytes, pattern: str) -> Tokenizer:
    """The tokenizer of a file in tiktoken's form: a token in base64 and its rank in each line.

    Raises:
        ValueError: it is malformed.
    """
    ranks: dict[bytes, int] = {}
    for line in data.splitlines():
        if line:
            token, _, rank = line.partition(b" ")
            try:
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (binascii.Error, ValueError):
                raise ValueError("a line is no token in base64 and its rank") from None
    if not ranks:
        raise ValueError("it is empty")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("its ranks are not 0, 1, 2, …")
    return _tokenizer(ranks, pattern, ())


def _tokenizer(ranks: Mapping[bytes, int], pattern: str, special: Sequence[str]) -> Tokenizer:
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"it has no token for the byte {missing[0]:#04x}")
    letters = byte_letters()
    vocabulary: dict[str, int] = {text: id_ for id_, text in enumerate(special)}
    merges: list[tuple[str, str]] = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        vocabulary[_text(token, letters)] = rank + len(special)
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in ranks and right in ranks]
        for left, right in sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]])):
            merges.append((_text(left, letters), _text(right, letters)))
    # A word that is a token is that token, whether merges lead to it or not.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return tokenizer


def byte_letters() -> dict[int, str]:
    """The character for each byte in texts of byte-level vocabularies, as GPT-2's has them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters: dict[int, Any] = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in letters)
    return letters | {byte: chr(0x100 + number) for number, byte in enumerate(others)}


def _text(token: bytes, letters: Mapping[int, str]) -> str:
    return "".join(letters[byte] for byte in token)
