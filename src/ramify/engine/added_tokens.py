"""What other files of a checkpoint say about tokens beside its `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_named_tokens(
    core: tokenizers.Tokenizer, config: Mapping[str, Any], legacy: Mapping[str, Any]
) -> None:
    """Add what `tokenizer.json` lacks, as transformers does: text that names a token then is one.

    Args:
        core: is changed.
        config: of `tokenizer_config.json`; its `added_tokens_decoder` has an entry for each id. If
            it has none, older files take part, with their content already merged into it.
        legacy: of `added_tokens.json`: text -> id.

    Tokens come in the order of their ids, then special tokens that have a role or are listed but
    have no id. What is in the vocabulary keeps its id, any other token gets the next one.

    Raises:
        ValueError: an entry is no token.
    """
    special, with_role = _special(config)
    present = {one.content: one for one in core.get_added_tokens_decoder().values()}
    before = {repr(one) for one in present.values()}
    entries = config.get("added_tokens_decoder")
    wanted: dict[str, tokenizers.AddedToken] = {}
    if entries is not None:
        for _, entry in sorted((int(index), entry) for index, entry in entries.items()):
            token = _token(entry)
            wanted[token.content] = token
    else:
        for text, _ in sorted(legacy.items(), key=lambda item: item[1]):
            plain = text not in special
            wanted[text] = tokenizers.AddedToken(text, normalized=plain, special=not plain)
        wanted = {text: one for text, one in wanted.items() if text not in present}
    for text, entry in special.items():
        known = wanted.get(text) or present.get(text)
        if known is None:
            wanted[text] = _token(entry, special=True)
        elif text in with_role and not known.special:
            known.special = True
            wanted[text] = known
    core.add_tokens([one for one in wanted.values() if one.content and repr(one) not in before])


def _special(config: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Special tokens that are named, text -> entry, and the texts that have a role.

    Of several entries for one text the last that differs from those before it counts.
    """
    named: list[Any] = []
    for role in ROLES:
        if config.get(role) and config[role] not in named:
            named.append(config[role])
    with_role = {_token(entry).content for entry in named}
    for name in LISTS:
        several = config.get(name) or ()
        several = several.values() if isinstance(several, Mapping) else several
        named.extend(entry for entry in several if entry and entry not in named)
    return {_token(entry).content: entry for entry in named}, with_role


def _token(entry: Any, *, special: bool | None = None) -> tokenizers.AddedToken:
    if isinstance(entry, str):
        return tokenizers.AddedToken(entry, normalized=False, special=True)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
        raise ValueError(f"{entry!r} is no token")
    flags = {name: bool(entry[name]) for name in FLAGS if name in entry}
    if special is not None:
        flags["special"] = special
    return tokenizers.AddedToken(entry["content"], **flags)
