"""The tokenizer and chat templates in a GGUF file's metadata."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models
from tokenizers.processors import TemplateProcessing

from ramify.engine.text.chat_template import DEFAULT
from ramify.engine.text.sentencepiece_model import Piece, PieceType, SentencePieceModel
from ramify.engine.text.split_patterns import FALLBACK, SPLITTINGS
from ramify.engine.text.tokenizer_limits import MAX_ADDED_TOKENS, check_tokenizer_json
from ramify.errors import CheckpointError, UnsupportedModelError, shortened
from ramify.library_panics import panics_as_errors
from ramify.models.configs.checkpoint_files import MAX_TEMPLATE_BYTES
from ramify.models.configs.fields import shown
from ramify.models.gguf.config import TOKENIZER, token_id
from ramify.models.gguf.container import Container, StringArray

logger = logging.getLogger(__name__)

BPE, SENTENCEPIECE = "gpt2", "llama"
WHOLE, TEMPLATE, TEMPLATES = (
    "tokenizer.huggingface.json",
    "tokenizer.chat_template",
    "tokenizer.chat_templates",
)
# Roles of chat templates -> those of GGUF.
ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
}
IDS = "use the original checkpoint in safetensors, or give prompts as token ids"


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer, its special tokens (role → text) and chat templates (name → source)."""

    core: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]


def has_gguf_tokenizer(container: Container) -> bool:
    """Whether a file has a tokenizer of any kind."""
    return f"{TOKENIZER}model" in container.metadata


def gguf_tokenizer(container: Container) -> GgufTokenizer:
    """Make the tokenizer of a GGUF file.

    Raises:
        CheckpointError: a key is missing, or its value is impossible.
        UnsupportedModelError: it is of a kind that is not supported.
    """
    tokens = _Tokens.of(container)
    kind, whole = container.metadata.get(f"{TOKENIZER}model"), container.metadata.get(WHOLE)
    try:
        with panics_as_errors("the package tokenizers"):
            if isinstance(whole, str):
                check_tokenizer_json(whole.encode())
                core = tokenizers.Tokenizer.from_str(whole)
            elif kind == BPE:
                core = _byte_level(container, tokens)
            elif kind == SENTENCEPIECE:
                core = _sentencepiece(container, tokens)
            else:
                raise UnsupportedModelError(
                    f"{container.path}: {TOKENIZER}model is {shown(kind)}; supported are {BPE!r} and "
                    f"{SENTENCEPIECE!r}; {IDS}"
                )
    except (CheckpointError, UnsupportedModelError):
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(
            f"{container.path}: its tokenizer cannot be made ({shortened(error)}); {IDS}"
        ) from error
    return GgufTokenizer(core, tokens.special_tokens(container), _templates(container))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The vocabulary: texts, and their kinds by the numbers of sentencepiece."""

    texts: list[str]
    kinds: list[int]

    @classmethod
    def of(cls, container: Container) -> _Tokens:
        """Read the vocabulary; CheckpointError if it is not possible."""
        name = f"{TOKENIZER}tokens"
        array = container.metadata.get(name)
        if not isinstance(array, StringArray):
            raise CheckpointError(
                f"{container.path}: {name}: expected an array of texts, found {shown(array)}; {IDS}"
            )
        texts = list(array)
        if len(set(texts)) != len(texts):
            first: dict[str, int] = {}
            id_, text = next(
                (id_, text) for id_, text in enumerate(texts) if first.setdefault(text, id_) != id_
            )
            raise CheckpointError(
                f"{container.path}: {name}: expected each text once, found {shown(text)} at {first[text]} "
                f"and {id_}; {IDS}"
            )
        return cls(texts, _numbers(container, "token_type", len(texts), PieceType.NORMAL))

    def special_tokens(self, container: Container) -> dict[str, str]:
        """Role → text."""
        ids = {name: token_id(container, role) for name, role in ROLES.items()}
        return {name: self.texts[id_] for name, id_ in ids.items() if id_ is not None}

    def added(self) -> list[AddedToken]:
        """Tokens that are found in a text before it is split."""
        made = [
            AddedToken(text, normalized=False, special=kind != PieceType.USER_DEFINED)
            for text, kind in zip(self.texts, self.kinds, strict=True)
            if text and kind in (PieceType.CONTROL, PieceType.USER_DEFINED)
        ]
        if len(made) > MAX_ADDED_TOKENS:
            raise ValueError(f"{len(made):,} control tokens, at most {MAX_ADDED_TOKENS:,} are read")
        return made


def _numbers(container: Container, key: str, count: int, default: int) -> list[Any]:
    """An array with a number for each token; `default` for all if there is none."""
    values = container.metadata.get(f"{TOKENIZER}{key}")
    if values is None:
        return [default] * count
    if not isinstance(values, np.ndarray) or len(values) < count:
        actual = f"{len(values)}" if isinstance(values, np.ndarray) else shown(values)
        raise CheckpointError(
            f"{container.path}: {TOKENIZER}{key}: expected {count} numbers, found {actual}; {IDS}"
        )
    return list(values[:count].tolist())


def _flag(container: Container, key: str, default: bool) -> bool:
    value = container.metadata.get(f"{TOKENIZER}{key}", default)
    if not isinstance(value, bool):
        raise CheckpointError(
            f"{container.path}: {TOKENIZER}{key}: expected true or false, found {shown(value)}; {IDS}"
        )
    return value


def _byte_level(container: Container, tokens: _Tokens) -> tokenizers.Tokenizer:
    """BPE over bytes, as GPT-2's."""
    pre = container.metadata.get(f"{TOKENIZER}pre")
    splitting = SPLITTINGS.get(pre) if isinstance(pre, str) else None
    if splitting is None:
        logger.warning(
            "%s: %spre is %s, which does not say how texts are split into words: numbers and punctuation "
            "may become other tokens than the model was trained with, and answers WORSE. Use a file made by "
            "a newer converter, or the original checkpoint.",
            container.path, TOKENIZER, "missing" if pre is None else f"{shown(pre)}, unknown here",
        )  # fmt: skip
        splitting = FALLBACK
    merges = container.metadata.get(f"{TOKENIZER}merges")
    if not isinstance(merges, StringArray):
        raise CheckpointError(
            f"{container.path}: {TOKENIZER}merges: expected an array of texts, found {shown(merges)}; {IDS}"
        )
    vocabulary = {
        text: id_
        for id_, (text, kind) in enumerate(zip(tokens.texts, tokens.kinds, strict=True))
        if kind != PieceType.UNUSED
    }
    # A space may begin the first half.
    cuts = ((text, text.find(" ", 1)) for text in merges)
    pairs = [(text[:cut], text[cut + 1 :]) for text, cut in cuts]
    core = tokenizers.Tokenizer(
        models.BPE(vocabulary, pairs, fuse_unk=False, ignore_merges=splitting.ignores_merges)
    )
    normalizer = splitting.normalizer()
    if normalizer is not None:
        core.normalizer = normalizer
    core.pre_tokenizer = splitting.pre_tokenizer()
    core.decoder = decoders.ByteLevel()
    core.add_tokens(tokens.added())
    _add_template(container, tokens, core, adds_bos=splitting.adds_bos)
    return core


def _add_template(
    container: Container, tokens: _Tokens, core: tokenizers.Tokenizer, *, adds_bos: bool
) -> None:
    """Put BOS and EOS around a text where the file says so."""
    ids = {
        role: token_id(container, role)
        for role, default in (("bos", adds_bos), ("eos", False))
        if _flag(container, f"add_{role}_token", default)
    }
    texts = {role: tokens.texts[id_] for role, id_ in ids.items() if id_ is not None}
    if texts:
        single = [texts.get("bos"), "$A", texts.get("eos")]
        core.post_processor = TemplateProcessing(
            single=[part for part in single if part],
            special_tokens=[(texts[role], ids[role]) for role in texts],
        )


def _sentencepiece(container: Container, tokens: _Tokens) -> tokenizers.Tokenizer:
    """BPE by scores, as sentencepiece's."""
    scores = _numbers(container, "scores", len(tokens.texts), 0)
    charsmap = container.metadata.get(f"{TOKENIZER}precompiled_charsmap")
    unknown = token_id(container, "unknown")
    if unknown is None:
        # The key may be missing, but not the token.
        unknown = tokens.kinds.index(PieceType.UNKNOWN) if PieceType.UNKNOWN in tokens.kinds else 0
    ids = {role: token_id(container, name) for role, name in ROLES.items()} | {"unk_token": unknown}
    model = SentencePieceModel(
        tuple(map(Piece, tokens.texts, scores, tokens.kinds)),
        is_unigram=False,
        has_byte_fallback=PieceType.BYTE in tokens.kinds,
        ids={role: -1 if id_ is None else id_ for role, id_ in ids.items()},
        charsmap=bytes(charsmap) if isinstance(charsmap, np.ndarray) else b"",
        adds_prefix=_flag(container, "add_space_prefix", True),
        removes_spaces=_flag(container, "remove_extra_whitespaces", False),
    )
    return model.convert(
        {
            "add_bos_token": _flag(container, "add_bos_token", True),
            "add_eos_token": _flag(container, "add_eos_token", False),
        }
    )


def _templates(container: Container) -> dict[str, str]:
    """Chat templates by name."""
    names = container.metadata.get(TEMPLATES)
    keys = {DEFAULT: TEMPLATE}
    if isinstance(names, StringArray):
        keys |= {name: f"{TEMPLATE}.{name}" for name in names}
    sources = {name: container.metadata.get(key) for name, key in keys.items()}
    templates = {name: source for name, source in sources.items() if isinstance(source, str)}
    for name, source in templates.items():
        if len(source) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(
                f"{container.path}: the chat template {shown(name)} has {len(source):,} characters, but at "
                f"most {MAX_TEMPLATE_BYTES:,} are read; download it again"
            )
    return templates
