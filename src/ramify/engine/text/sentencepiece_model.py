"""A sentencepiece `tokenizer.model` as a tokenizer of the tokenizers package, without sentencepiece."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from ramify.engine.text.added_tokens import ADDED_TOKENS_DECODER

SPACE = "\u2581"  # stands for a space in pieces


class PieceType(IntEnum):
    """Kinds of pieces, by their number in the file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry of the vocabulary; its id is its position."""

    text: str
    score: float
    type: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """The parsed contents of a `tokenizer.model`."""

    pieces: tuple[Piece, ...]
    is_unigram: bool
    has_byte_fallback: bool
    ids: Mapping[str, int]  # role → id, -1 if there is none
    charsmap: bytes  # of the normalizer; empty: texts are taken as they are
    adds_prefix: bool  # a space before the text
    removes_spaces: bool  # around the text, and all but one inside it

    @classmethod
    def parse(cls, data: bytes) -> SentencePieceModel:
        """Read the file's content.

        Raises:
            ValueError: it is no sentencepiece model, or one of a kind that is not converted.
        """
        pieces = list[Piece]()
        trainer: dict[int, Any] = {}
        normalizer: dict[int, Any] = {}
        for number, value in _fields(data):
            if number == 1:
                fields = dict(_fields(_bytes(value)))
                score = _bytes(fields.get(2, bytes(4)))
                if len(score) != 4:
                    raise ValueError("the score of a piece is no number")
                [rating] = struct.unpack("<f", score)
                pieces.append(Piece(_bytes(fields.get(1)).decode(), rating, fields.get(3, 1)))
            elif number in (2, 3):
                (trainer if number == 2 else normalizer).update(_fields(_bytes(value)))
        kind = trainer.get(3, 1)
        if not pieces or kind not in (1, 2):
            raise ValueError("it is no sentencepiece model of the type BPE or unigram")
        if trainer.get(24) or not normalizer.get(5, 1):
            raise ValueError("it writes white space as a suffix, or not at all")
        ids = {
            "unk_token": _signed(trainer.get(40, 0)),
            "bos_token": _signed(trainer.get(41, 1)),
            "eos_token": _signed(trainer.get(42, 2)),
            "pad_token": _signed(trainer.get(43, -1)),
        }
        return cls(
            tuple(pieces),
            is_unigram=kind == 1,
            has_byte_fallback=bool(trainer.get(35)),
            ids=ids,
            charsmap=normalizer.get(2, b""),
            adds_prefix=bool(normalizer.get(3, 1)),
            removes_spaces=bool(normalizer.get(4, 1)),
        )

    def with_added_tokens(self, config: Mapping[str, Any]) -> SentencePieceModel:
        """The model with the texts that `tokenizer_config.json` gives to ids of the vocabulary.

        Fine-tuned models name ids that were held free, such as `<unused0>`.
        """
        pieces, texts = list(self.pieces), {piece.text for piece in self.pieces}
        decoder = config.get(ADDED_TOKENS_DECODER)
        for key, entry in decoder.items() if isinstance(decoder, Mapping) else ():
            text = entry.get("content") if isinstance(entry, Mapping) else entry
            if not key.isdigit() or int(key) >= len(pieces) or not isinstance(text, str):
                continue
            if text and text not in texts:
                is_special = not isinstance(entry, Mapping) or entry.get("special", True)
                kind = PieceType.CONTROL if is_special else PieceType.USER_DEFINED
                pieces[int(key)] = replace(pieces[int(key)], text=text, type=kind)
        return replace(self, pieces=tuple(pieces))

    def special_tokens(self) -> dict[str, str]:
        """Role → text."""
        in_range = {role: id_ for role, id_ in self.ids.items() if 0 <= id_ < len(self.pieces)}
        return {role: self.pieces[id_].text for role, id_ in in_range.items()}

    def convert(self, config: Mapping[str, Any]) -> Tokenizer:
        """The same tokenizer; `config` is the checkpoint's `tokenizer_config.json`."""
        tokenizer = Tokenizer(self._unigram() if self.is_unigram else self._bpe())
        steps: list[normalizers.Normalizer] = []
        if self.charsmap:
            steps.append(normalizers.Precompiled(self.charsmap))
        if self.removes_spaces:
            steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        adds_prefix = config.get("add_prefix_space", self.adds_prefix) is not False
        # Only the text begins with the space then, and not what follows a special token.
        once = adds_prefix and config.get("legacy") is False
        if adds_prefix and not once:
            steps.append(normalizers.Prepend(SPACE))
        steps.append(normalizers.Replace(" ", SPACE))
        tokenizer.normalizer = normalizers.Sequence(steps)
        if once:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        strip = [decoders.Strip(" ", 1, 0)] if adds_prefix else []
        tokenizer.decoder = decoders.Sequence([*parts, *strip])
        unknown = self.special_tokens().get("unk_token", "")
        added = [
            AddedToken(piece.text, normalized=False, special=piece.type != PieceType.USER_DEFINED)
            for piece in self.pieces
            if piece.type in (PieceType.CONTROL, PieceType.USER_DEFINED) or piece.text == unknown
        ]
        tokenizer.add_tokens(added)
        self._add_template(tokenizer, config)
        return tokenizer

    def _add_template(self, tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
        """Tokens that `add_special_tokens` puts around a text: BOS unless the config says no."""
        special = self.special_tokens()
        bos, eos = special.get("bos_token"), special.get("eos_token")
        begin = [bos] if bos and config.get("add_bos_token", True) else []
        end = [eos] if eos and config.get("add_eos_token", False) else []
        if begin or end:
            tokens = [(text, tokenizer.token_to_id(text)) for text in (*begin, *end)]
            tokenizer.post_processor = TemplateProcessing(
                single=[*begin, "$A", *end], special_tokens=tokens
            )

    def _unigram(self) -> models.Unigram:
        vocabulary = [(piece.text, piece.score) for piece in self.pieces]
        return models.Unigram(
            vocabulary, unk_id=self.ids["unk_token"], byte_fallback=self.has_byte_fallback
        )

    def _bpe(self) -> models.BPE:
        vocabulary = {piece.text: id_ for id_, piece in enumerate(self.pieces)}
        return models.BPE(
            vocabulary,
            list(self._merges(vocabulary)),
            unk_token=self.pieces[self.ids["unk_token"]].text,
            fuse_unk=True,
            byte_fallback=self.has_byte_fallback,
        )

    def _merges(self, vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Every way to put a piece together of two others, in the order of the pieces' scores."""
        whole = {PieceType.NORMAL, PieceType.USER_DEFINED, PieceType.UNUSED}
        pieces = [piece for piece in self.pieces if piece.type in whole and len(piece.text) > 1]
        for piece in sorted(pieces, key=lambda piece: -piece.score):
            text = piece.text
            known = [
                (left, right)
                for cut in range(1, len(text))
                if (left := text[:cut]) in vocabulary and (right := text[cut:]) in vocabulary
            ]
            if len(known) > 1:
                known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
            yield from known


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protocol buffer's fields: integers, or bytes of all other types.

    Raises:
        ValueError: the data is no protocol buffer.
    """
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if kind == 2:
            length, position = _varint(data, position)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError("it is no protocol buffer")
        if position + length > len(data):
            raise ValueError("it is cut off, or no protocol buffer")
        yield number, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
    raise ValueError("it is cut off, or no protocol buffer")


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("it is no sentencepiece model")
    return value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
