"""Text to token ids and back, chat messages to text, and text as it is generated."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ramify.engine.text.added_tokens import (
    ADDED_TOKENS_DECODER,
    SPECIAL_TOKEN_ROLES,
    add_named_tokens,
    merge_tokenizer_configs,
    parse_added_token,
)
from ramify.engine.text.chat_template import ChatTemplates, Messages, read_chat_templates
from ramify.engine.text.special_tokens import SpecialTokenEscaper
from ramify.errors import CheckpointError, InvalidParamsError


class Tokenizer:
    """The tokenizer of one checkpoint: `tokenizer.json`, its special tokens and chat templates."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
    ) -> None:
        """Wrap a tokenizer of the tokenizers package.

        Args:
            special_tokens: role -> text, such as bos_token -> <s>; templates see them.
            chat_templates: name -> Jinja source; `default` is the usual one.
        """
        self._core = core
        self._core.no_truncation()
        self._core.no_padding()
        self.special_tokens = dict(special_tokens)
        self._chat_templates = ChatTemplates(chat_templates, special_tokens)
        self._escaper = SpecialTokenEscaper(core)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """The tokenizer of a checkpoint directory.

        Raises:
            CheckpointError: no `tokenizer.json`, a file that cannot be read, or one that names
                something as a token that is none.
        """
        source = path / "tokenizer.json"
        if not source.is_file():
            raise CheckpointError(
                f"{source} is missing; add it, or give prompts as token ids (other tokenizer "
                "formats are not read)"
            )
        try:
            core = tokenizers.Tokenizer.from_file(str(source))
        except Exception as error:  # the package raises nothing narrower
            raise CheckpointError(f"{source} cannot be read: {error}; download it again") from error
        config = _read_json(path / "tokenizer_config.json")
        older, legacy = (
            _read_json(path / name) for name in ("special_tokens_map.json", "added_tokens.json")
        )
        try:
            named = merge_tokenizer_configs(config, older)
            add_named_tokens(core, config if ADDED_TOKENS_DECODER in config else named, legacy)
            special = {
                name: parse_added_token(named[name]).content
                for name in SPECIAL_TOKEN_ROLES
                if named.get(name)
            }
        except ValueError as error:
            raise CheckpointError(
                f"{path}: tokens that are named beside tokenizer.json cannot be added: {error}"
            ) from error
        return cls(core, special_tokens=special, chat_templates=read_chat_templates(path, config))

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a text, added tokens included."""
        return self._core.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """The content of a `tokenizer.json` for it."""
        return self._core.to_str()

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if this tokenizer names one."""
        return self._id_of("bos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end of text; the model's configuration may name more."""
        token = self._id_of("eos_token")
        return () if token is None else (token,)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that decoding leaves out unless told otherwise."""
        added = self._core.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered at all."""
        return self._chat_templates.default is not None

    @property
    def chat_template(self) -> str | None:
        """The source of the usual template."""
        return self._chat_templates.default

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._core.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
        """Token ids as 32-bit integers; with special tokens, what the model expects around text."""
        _require_unicode(text)
        return array("i", self._core.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_with_offsets(self, text: str) -> tuple[array[int], array[int]]:
        """Ids without special tokens, and where in the text each of them ends, in characters."""
        _require_unicode(text)
        if guarded := self._escaper.encode(text):
            return guarded
        found = self._core.encode(text, add_special_tokens=False)
        return array("i", found.ids), array("i", (end for _, end in found.offsets))

    def escape_special_tokens(self, value: Any) -> Any:
        """What users wrote, nested as it may be, with guards in every special token.

        `encode_with_offsets` takes such tokens for the text that they are to their writer, so that
        a message cannot end itself and begin another. Texts without special tokens stay the same.
        """
        return self._escaper.escape_special_tokens(value)

    @property
    def boundary_tokens(self) -> tuple[str, ...]:
        """Texts of the special tokens, longest first; what stands between them is apart."""
        added = self._core.get_added_tokens_decoder().values()
        plain = (one for one in added if one.special and not (one.lstrip or one.rstrip))
        texts = {one.content for one in plain if not one.single_word and one.content}
        return tuple(sorted(texts, key=lambda text: (-len(text), text)))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these ids; ids without a text, as of padded vocabularies, are left out."""
        return self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special ones and leading spaces included.

        Part of a character is shown as U+FFFD, an id without a text as nothing.
        """
        piece = self._core.id_to_token(token_id)
        if piece is None:
            return ""
        text = self._core.decode([token_id], skip_special_tokens=False)
        starts_word = piece.startswith("\u2581") and not text.startswith(" ")
        return f" {text}" if starts_word else text

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text that the checkpoint's template makes of a conversation.

        Args:
            messages: each with `role` and `content`, and whatever else the template reads; what
                is None is not there, unless the template fails without it.
            add_generation_prompt: end with what begins the assistant's turn.
            tools: JSON schemas of functions; a template named `tool_use` is preferred for them.
            kwargs: further variables of the template.

        Raises:
            ChatTemplateError: there is no template, or it cannot render these messages.
        """
        return self._chat_templates.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs
        )

    def encode_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> array[int]:
        """Token ids of `apply_chat_template`; the template writes the special tokens, nobody else.

        Raises:
            ChatTemplateError: as `apply_chat_template`.
        """
        text = self.apply_chat_template(
            self.escape_special_tokens(messages),
            add_generation_prompt=add_generation_prompt,
            **self.escape_special_tokens(kwargs),
        )
        return self.encode_with_offsets(text)[0]


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair: no bytes, no tokens
        name = f"prompt[{error.start}]"
        raise InvalidParamsError(name, text[error.start], "a Unicode character") from error


def _read_json(path: Path) -> dict[str, Any]:
    """An optional object; an absent file is an empty one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download it again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds {type(found).__name__}, not an object")
    return found
