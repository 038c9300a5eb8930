"""What other files of a checkpoint say about tokens beside its `tokenizer.json`."""

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
LISTS = ("extra_special_tokens", "additional_special_tokens")  # the first that has any counts
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
ADDED_TOKENS_DECODER = "added_tokens_decoder"  # of `tokenizer_config.json`: a token for each id


def merge_tokenizer_configs(config: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json` with `special_tokens_map.json`, which older tools write.

    It goes before the other one unless that has `ADDED_TOKENS_DECODER`, and its list of tokens
    goes behind.
    """
    if ADDED_TOKENS_DECODER in config:
        return {**older, **config}
    both = {name: value for name, value in {**config, **older}.items() if name not in LISTS}
    extra, others = LISTS
    if isinstance(config.get(extra), Mapping):
        both[extra] = config[extra]
        lists = (_list(older, extra), _list(older, others), _list(config, others))
        both[others] = next((found for found in lists if found), [])
    else:
        both[others] = [*_listed(config), *_list(older, extra)] or _list(older, others)
    return both


def add_named_tokens(
    core: tokenizers.Tokenizer, config: Mapping[str, Any], legacy: Mapping[str, Any]
) -> None:
    """Add what `tokenizer.json` lacks, as transformers does: text that names a token then is one.

    Args:
        core: is changed.
        config: of `tokenizer_config.json`; without `ADDED_TOKENS_DECODER`, as
            `merge_tokenizer_configs` makes it.
        legacy: of `added_tokens.json`, which counts where there are no `ADDED_TOKENS_DECODER`:
            text -> id.

    Tokens come in the order of their ids, then special tokens that have a role or are listed but
    have no id. What is in the vocabulary keeps its id, any other token gets the next one, whatever
    the files say; that they say another is logged.

    Raises:
        ValueError: an entry is no token, or an id no number.
    """
    special, with_role = _special(config)
    added = core.get_added_tokens_decoder()
    present = {one.content: one for one in added.values()}
    before = {repr(one) for one in present.values()}
    is_new = ADDED_TOKENS_DECODER in config
    ids: dict[int, Any] = _by_id(config[ADDED_TOKENS_DECODER]) if is_new else _by_legacy_id(legacy)
    wanted: dict[str, tokenizers.AddedToken] = {}
    for index, entry in sorted(ids.items(), key=lambda item: item[0]):
        if is_new:
            token = parse_added_token(entry)
            wanted[token.content] = token
        elif index not in added and entry not in present:
            plain = entry not in special
            wanted[entry] = tokenizers.AddedToken(entry, normalized=plain, special=not plain)
    for text, entry in special.items():
        known = wanted.get(text) or (None if is_new else present.get(text))
        if known is not None:
            known.special |= text in with_role
            wanted[text] = known
        elif text not in present:
            wanted[text] = parse_added_token(entry, special=True)
    core.add_tokens([one for one in wanted.values() if one.content and repr(one) not in before])
    for index, entry in ids.items():
        text = parse_added_token(entry).content
        if text in wanted and core.token_to_id(text) != index:
            logger.warning(
                "token %r has the id %s, where the files of the tokenizer say %d; so it has in "
                "transformers", text, core.token_to_id(text), index,
            )  # fmt: skip


def _special(config: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Special tokens that are named, text -> entry, and the texts that have a role.

    Any key that ends in `_token`, and any key of a mapping of tokens, is a role. Of several entries
    for one text the last that differs from those before it counts.
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
    named.extend(entry for entry in _listed(config) if entry and entry not in named)
    return {parse_added_token(entry).content: entry for entry in named}, with_role


def _listed(config: Mapping[str, Any]) -> list[Any]:
    """Special tokens without a role."""
    return next((found for name in LISTS if (found := _list(config, name))), [])


def _list(config: Mapping[str, Any], name: str) -> list[Any]:
    found = config.get(name) or []
    if isinstance(found, Mapping):  # of roles
        return []
    if not isinstance(found, list):
        raise ValueError(f"{name} is {found!r}; it must be a list")
    return found


def _by_id(entries: Any) -> dict[int, Any]:
    if not isinstance(entries, Mapping):
        raise ValueError(f"{ADDED_TOKENS_DECODER} is {entries!r}; it must be an object")
    return {int(index): entry for index, entry in entries.items()}


def _by_legacy_id(legacy: Mapping[str, Any]) -> dict[int, str]:
    for text, index in legacy.items():
        if not isinstance(index, int) or isinstance(index, bool):
            raise ValueError(f"the id of {text!r} is {index!r}; it must be a number")
    return {index: text for text, index in legacy.items()}


def parse_added_token(entry: Any, *, special: bool | None = None) -> tokenizers.AddedToken:
    """What files give plainly or as an object; `special`, if given, goes before its own.

    Raises:
        ValueError: it is no token.
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
