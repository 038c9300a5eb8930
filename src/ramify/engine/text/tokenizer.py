"""Text to token ids and back, chat messages to text, and text as it is generated."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ramify.engine.text.added_tokens import (
    ADDED_TOKENS_DECODER,
    SPECIAL_TOKEN_ROLES,
    add_named_tokens,
    merge_tokenizer_configs,
    parse_added_token,
)
from ramify.engine.text.special_tokens import SpecialTokenEscaper
from ramify.errors import ChatTemplateError, CheckpointError, InvalidParamsError

DEFAULT, TOOL_USE = "default", "tool_use"
REPLACEMENT = "\ufffd"  # what decoding shows for bytes that are not, or not yet, a character
MAX_HELD_TOKENS = 64  # longer than any character; bounds the work on endless broken bytes

# What a template does with messages that it did not expect is up to its author.
_TEMPLATE_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

Messages = Sequence[Mapping[str, Any]]


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
        self._templates = dict(chat_templates)
        self._environment = _environment()
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
        return cls(core, special_tokens=special, chat_templates=_templates(path, config))

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
        return DEFAULT in self._templates

    @property
    def chat_template(self) -> str | None:
        """The source of the usual template."""
        return self._templates.get(DEFAULT)

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
        name = TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            raise ChatTemplateError(
                "the checkpoint has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); send a plain prompt instead of messages"
            )
        variables = {
            **self.special_tokens,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **kwargs,
        }
        # What is None is not there, as in transformers; some templates ask whether it is none.
        there = [
            {key: value for key, value in one.items() if value is not None}
            if isinstance(one, Mapping)
            else one
            for one in messages
        ]
        try:
            template = self._environment.from_string(self._templates[name])
            try:
                return template.render(variables, messages=there)
            except _TEMPLATE_FAULTS:
                if there == list(messages):
                    raise
                return template.render(variables, messages=messages)
        except _TEMPLATE_FAULTS as error:
            raise ChatTemplateError(
                f"the chat template cannot render these {len(messages)} messages: {error}"
            ) from error

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


class Detokenizer:
    """The text of a growing sequence, piece by piece, never half a character.

    The pieces together are what `Tokenizer.decode` makes of all tokens. (Where a tokenizer shows
    each broken byte by itself, or after more than `MAX_HELD_TOKENS` broken bytes in a row, the
    number of U+FFFD signs can differ.)
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._window: list[int] = []  # the tokens told last, then those not told yet
        self._prefix_len = 0
        self._prefix_text = ""  # text of the former: decoders treat the start of a text specially
        self._held_text = ""  # text of the latter, when it may still change

    def step(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        new = self._decode()[len(self._prefix_text) :]
        num_held = len(self._window) - self._prefix_len
        if (not new or new.endswith(REPLACEMENT)) and num_held < MAX_HELD_TOKENS:
            self._held_text = new
            return ""
        self._held_text = ""
        self._window = self._window[self._prefix_len :]
        self._prefix_len = len(self._window)
        self._prefix_text = self._decode()
        return new

    def finish(self) -> str:
        """What was held back: a character that stays incomplete."""
        held, self._held_text = self._held_text, ""
        self._window, self._prefix_len, self._prefix_text = [], 0, ""
        return held

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant says, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - read by jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags, as they are."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it; they are foreign code, so it is the sandboxed one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter, which models have never seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - local, as templates expect


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; files win over what tokenizer_config.json says."""
    templates: dict[str, str] = {}
    found = config.get("chat_template")
    if isinstance(found, str):
        templates[DEFAULT] = found
    elif isinstance(found, list):
        for entry in found:
            if isinstance(entry, Mapping) and {"name", "template"} <= entry.keys():
                templates[str(entry["name"])] = str(entry["template"])
    files = {DEFAULT: path / "chat_template.jinja"}
    files |= {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from error
    return templates


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
