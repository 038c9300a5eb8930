"""Added and special tokens that a checkpoint names in other files than `tokenizer.json`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import tokenizers

logger = logging.getLogger(__name__)

SPECIAL_TOKEN_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
LISTS = ("extra_special_tokens", "additional_special_tokens")  # the first that has entries counts
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
ADDED_TOKENS_DECODER = "added_tokens_decoder"  # in `tokenizer_config.json`: id → token


def merge_tokenizer_configs(config: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json` merged with `special_tokens_map.json`, which older tools write.

    A config with `ADDED_TOKENS_DECODER` wins over `older`. Without it `older` wins, except that its
    list of extra special tokens is appended to that of the config.
    """
    if ADDED_TOKENS_DECODER in config:
        return {**older, **config}
    merged = {name: value for name, value in {**config, **older}.items() if name not in LISTS}
    extra, additional = LISTS
    if isinstance(config.get(extra), Mapping):
        merged[extra] = config[extra]
        lists = (_list(older, extra), _list(older, additional), _list(config, additional))
        merged[additional] = next((tokens for tokens in lists if tokens), [])
    else:
        roleless = [*_roleless_tokens(config), *_list(older, extra)]
        merged[additional] = roleless or _list(older, additional)
    return merged


def add_named_tokens(
    core: tokenizers.Tokenizer, config: Mapping[str, Any], legacy: Mapping[str, Any]
) -> None:
    """Add the tokens that `tokenizer.json` lacks to `core`, as transformers does.

    Args:
        core: changed in place.
        config: of `tokenizer_config.json`; without `ADDED_TOKENS_DECODER`, the result of
            `merge_tokenizer_configs`.
        legacy: of `added_tokens.json`, text → id; read only without `ADDED_TOKENS_DECODER`.

    Tokens are added in the order of their ids, then the special tokens without an id. A token that
    is in the vocabulary keeps its id, a new one gets the next free id; if the files name another
    id, a warning is logged.

    Raises:
        ValueError: an entry is no token, or an id is no number.
    """
    special, with_role = _special(config)
    added = core.get_added_tokens_decoder()
    present = {token.content: token for token in added.values()}
    before = {repr(token) for token in present.values()}
    has_decoder = ADDED_TOKENS_DECODER in config
    by_id: dict[int, Any] = (
        _by_id(config[ADDED_TOKENS_DECODER]) if has_decoder else _by_legacy_id(legacy)
    )
    wanted: dict[str, tokenizers.AddedToken] = {}
    for token_id, entry in sorted(by_id.items(), key=lambda item: item[0]):
        if has_decoder:
            token = parse_added_token(entry)
            wanted[token.content] = token
        elif token_id not in added and entry not in present:
            plain = entry not in special
            wanted[entry] = tokenizers.AddedToken(entry, normalized=plain, special=not plain)
    for text, entry in special.items():
        known = wanted.get(text) or (None if has_decoder else present.get(text))
        if known is not None:
            known.special |= text in with_role
            wanted[text] = known
        elif text not in present:
            wanted[text] = parse_added_token(entry, special=True)
    core.add_tokens([new for new in wanted.values() if new.content and repr(new) not in before])
    for token_id, entry in by_id.items():
        text = parse_added_token(entry).content
        if text in wanted and core.token_to_id(text) != token_id:
            logger.warning(
                "token %r has the id %s, as in transformers, although the tokenizer's files say %d",
                text, core.token_to_id(text), token_id,
            )  # fmt: skip


def _special(config: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Special tokens, text → entry, and the texts of those that have a role.

    Roles are the keys that end in `_token`, and all keys of a mapping in `LISTS`. If a text has
    several entries that differ, the last of them counts.
    """
    entries = [config.get(role) for role in SPECIAL_TOKEN_ROLES]
    for name, value in config.items():
        if name.endswith("_token") and name not in SPECIAL_TOKEN_ROLES and isinstance(value, str):
            entries.append(value)
    for name in LISTS:
        if isinstance(config.get(name), Mapping):
            entries.extend(config[name].values())
    named: list[Any] = []
    for entry in entries:
        if entry and entry not in named:
            named.append(entry)
    with_role = {parse_added_token(entry).content for entry in named}
    named.extend(entry for entry in _roleless_tokens(config) if entry and entry not in named)
    return {parse_added_token(entry).content: entry for entry in named}, with_role


def _roleless_tokens(config: Mapping[str, Any]) -> list[Any]:
    """Special tokens without a role."""
    return next((tokens for name in LISTS if (tokens := _list(config, name))), [])


def _list(config: Mapping[str, Any], name: str) -> list[Any]:
    entries = config.get(name) or []
    if isinstance(entries, Mapping):  # role → token
        return []
    if not isinstance(entries, list):
        raise ValueError(f"{name} is {entries!r}; it must be a list")
    return entries


def _by_id(entries: Any) -> dict[int, Any]:
    if not isinstance(entries, Mapping):
        raise ValueError(f"{ADDED_TOKENS_DECODER} is {entries!r}; it must be an object")
    return {int(token_id): entry for token_id, entry in entries.items()}


def _by_legacy_id(legacy: Mapping[str, Any]) -> dict[int, str]:
    for text, token_id in legacy.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ValueError(f"the id of {text!r} is {token_id!r}; it must be a number")
    return {token_id: text for text, token_id in legacy.items()}


def parse_added_token(entry: Any, *, special: bool | None = None) -> tokenizers.AddedToken:
    """The token of an entry, which is a text or an object; `special` overrides the entry's flag.

    Raises:
        ValueError: the entry is no token.
    """
    if isinstance(entry, str):
        return tokenizers.AddedToken(entry, normalized=False, special=True)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
        raise ValueError(f"{entry!r} is no token")
    flags = {name: entry[name] for name in FLAGS if name in entry}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise ValueError(f"{entry!r} has a flag that is neither true nor false")
    if special is not None:
        flags["special"] = special
    return tokenizers.AddedToken(entry["content"], **flags)
