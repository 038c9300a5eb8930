"""`Tokenizer`: text to token ids and back, for one Hugging Face checkpoint."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
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
from ramify.engine.text.gguf_tokenizer import gguf_tokenizer
from ramify.engine.text.sentencepiece_model import SPACE
from ramify.engine.text.special_tokens import SpecialTokenEscaper
from ramify.engine.text.token_bytes import TokenBytes, decoder_kinds
from ramify.engine.text.tokenizer_files import read_tokenizer
from ramify.errors import (
    CheckpointError,
    InvalidParamsError,
    PromptTooLongError,
)
from ramify.library_panics import panics_as_errors
from ramify.models.configs.fields import read_optional_json
from ramify.models.gguf.container import is_gguf, read_container

MAX_DECODED = 1 << 15  # texts of single tokens, some 3 MB
_guarded = panics_as_errors("the package tokenizers")


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
            special_tokens: role → text, such as bos_token → <s>; chat templates see them.
            chat_templates: name → Jinja source; `default` is used unless tools ask for `tool_use`.
        """
        self._core = core
        self._decoded: dict[int, str] = {}  # see `decode_token`
        self._core.no_truncation()
        self._core.no_padding()
        self.special_tokens = dict(special_tokens)
        self._chat_templates = ChatTemplates(chat_templates, special_tokens)
        self._escaper = SpecialTokenEscaper(core)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint directory, or of a GGUF file.

        Raises:
            CheckpointError: there is no tokenizer, a file cannot be read or converted, or an entry
                that should be a token is not one.
            UnsupportedModelError: that of a GGUF file is of a kind that is not supported.
        """
        if is_gguf(path):
            made = gguf_tokenizer(read_container(path))
            return cls(
                made.core,
                special_tokens=made.special_tokens,
                chat_templates=made.chat_templates,
            )
        config = read_optional_json(path / "tokenizer_config.json")
        file = read_tokenizer(path, config)
        core = file.core
        special_tokens_map = read_optional_json(path / "special_tokens_map.json")
        added_tokens = read_optional_json(path / "added_tokens.json")
        try:
            merged = merge_tokenizer_configs(config, special_tokens_map)
            has_decoder = ADDED_TOKENS_DECODER in config
            add_named_tokens(core, config if has_decoder else merged, added_tokens)
            special = {
                role: parse_added_token(merged[role]).content
                for role in SPECIAL_TOKEN_ROLES
                if merged.get(role)
            }
            special = {**file.special_tokens, **special}
        except ValueError as error:
            raise CheckpointError(
                f"{path}: the tokens named beside tokenizer.json cannot be added: {error}"
            ) from error
        return cls(core, special_tokens=special, chat_templates=read_chat_templates(path, config))

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a text, added tokens included."""
        return self._core.get_vocab_size(with_added_tokens=True)

    @_guarded
    def to_json(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`."""
        return self._core.to_str()

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits: equal ones tokenise and render chats alike."""
        parts = [
            self.to_json(),
            repr(sorted(self.special_tokens.items())),
            *self.chat_template_sources,
        ]
        return hashlib.blake2b(
            "\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16
        ).hexdigest()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Id of the tokenizer's end-of-text token, if it has one; `config.json` may name more."""
        text = self.special_tokens.get("eos_token")
        token = None if text is None else self._core.token_to_id(text)
        return () if token is None else (token,)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` skips by default."""
        return frozenset(self.special_token_texts)

    @cached_property
    def special_token_texts(self) -> dict[int, str]:
        """Texts of the ids that `decode` skips by default."""
        added = self._core.get_added_tokens_decoder()
        return {token: entry.content for token, entry in added.items() if entry.special}

    @property
    def added_token_texts(self) -> dict[int, str]:
        """Texts of the tokens that were added to the vocabulary, special or not."""
        added = self._core.get_added_tokens_decoder()
        return {token: entry.content for token, entry in added.items()}

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` has a template."""
        return self._chat_templates.default is not None

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the default template; None if there is none."""
        return self._chat_templates.default

    @cached_property
    def chat_template_names(self) -> frozenset[str]:
        """All names of variables that the chat templates mention."""
        return self._chat_templates.variable_names()

    @property
    def chat_template_sources(self) -> tuple[str, ...]:
        """Jinja sources of the templates that are rendered: plain, with tools, with documents."""
        return self._chat_templates.sources

    @_guarded
    def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
        """Token ids [T] int32; `add_special_tokens` adds what the model expects around a text (BOS)."""
        _require_unicode(text)
        return array("i", self._core.encode(text, add_special_tokens=add_special_tokens).ids)

    @property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token: a text of n bytes has at least n / this many tokens."""
        return max((len(piece.encode()) for piece in self._core.get_vocab(True)), default=1)

    @_guarded
    def encode_with_offsets(
        self, text: str, max_tokens: int | None = None
    ) -> tuple[array[int], array[int]]:
        """Token ids [T] of a text as it stands, and the character at which each token ends [T].

        Raises:
            PromptTooLongError: it has more than `max_tokens`.
        """
        _require_unicode(text)
        if encoded := self._escaper.encode(text, max_tokens):
            return encoded
        encoding = self._core.encode(text, add_special_tokens=False)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise PromptTooLongError(len(encoding), max_tokens)
        return array("i", encoding.ids), array("i", (end for _, end in encoding.offsets))

    def escape_special_tokens(self, value: Any) -> Any:
        """Escape special tokens in what a user wrote: a text, or lists and mappings of texts.

        `encode_with_offsets` reads an escaped token as plain text, so a message cannot end itself
        and begin another. Texts without special tokens are returned unchanged.
        """
        return self._escaper.escape_special_tokens(value)

    @property
    def boundary_tokens(self) -> tuple[str, ...]:
        """Texts of special tokens at which a text may be cut: both sides tokenise by themselves.

        Longest first.
        """
        added = self._core.get_added_tokens_decoder().values()
        plain = (token for token in added if token.special and not (token.lstrip or token.rstrip))
        texts = {token.content for token in plain if not token.single_word and token.content}
        return tuple(sorted(texts, key=lambda text: (-len(text), text)))

    @_guarded
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids without a text (padding of the vocabulary) are skipped."""
        return self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """`decode` of a single token, remembered: every answer begins anew behind each of its tokens."""
        text = self._decoded.get(token_id)
        if text is None:
            text = self.decode([token_id])
            if len(self._decoded) >= MAX_DECODED:  # by two threads, more may be there
                self._decoded.clear()
            self._decoded[token_id] = text
        return text

    @cached_property
    def joins_bytes(self) -> bool:
        """Whether a text is made of the bytes of its tokens alone, whatever is beside them."""
        return decoder_kinds(self._core) == {"ByteLevel"}

    @_guarded
    def token_text(self, token_id: int) -> str:
        """The text of one token, leading space included; special tokens are not skipped.

        A token that is part of a character is U+FFFD, an id without a text is "".
        """
        piece = self._core.id_to_token(token_id)
        if piece is None:
            return ""
        text = self._core.decode([token_id], skip_special_tokens=False)
        starts_word = piece.startswith(SPACE) and not text.startswith(" ")
        return f" {text}" if starts_word else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, as `token_text`; those of a part of a character are its own."""
        own = self._token_bytes.of(token_id)
        return self.token_text(token_id).encode() if own is None else own

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self._core)

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render a conversation with the checkpoint's chat template.

        Args:
            messages: each has `role` and `content`, and whatever else the template reads. Keys
                whose value is None are left out, unless the template fails without them.
            add_generation_prompt: end with the beginning of the assistant's turn.
            tools: JSON schemas of functions; rendered by the template `tool_use`, if there is one.
            kwargs: further variables of the template.

        Raises:
            ChatTemplateError: there is no template, or it cannot render these messages.
        """
        return self._chat_templates.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs
        )

    def render_chat(self, messages: Messages, **kwargs: Any) -> str:
        """`apply_chat_template`, with special tokens in what users wrote escaped."""
        escape = self.escape_special_tokens
        return self.apply_chat_template(escape(messages), **escape(kwargs))

    def encode_chat(self, messages: Messages, **kwargs: Any) -> array[int]:
        """Token ids of `render_chat`.

        Raises:
            ChatTemplateError: as `apply_chat_template`.
        """
        return self.encode_with_offsets(self.render_chat(messages, **kwargs))[0]


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair has no bytes, so no tokens
        name = f"prompt[{error.start}]"
        raise InvalidParamsError(name, text[error.start], "a Unicode character") from error
