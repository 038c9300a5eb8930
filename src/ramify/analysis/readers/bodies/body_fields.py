"""What a request body says, whatever the API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ramify.analysis.records import Segment

CHAT, COMPLETIONS = "openai-chat", "openai-completions"
RESPONSES, ANTHROPIC = "openai-responses", "anthropic-messages"
GEMINI = "gemini"

_CONVERSATION_KEYS = ("session_id", "conversation_id", "thread_id", "chat_id")
_CLAUDE_CODE_USER = re.compile(r"_session_([0-9a-fA-F-]{8,})$")
# `... (litellm_truncated skipped 1234 chars) ...` in the middle, or a mark at the end. Tools that cut
# their own results write `[truncated]` into them: the prompt was sent like that.
_SPLICE = re.compile(r"\(litellm_truncated (?:skipped )?\d+ chars\)")
DAY_S = 86_400.0
_CUT_ENDS = ("[TRUNCATED]", "<TRUNCATED>")


@dataclass(frozen=True, slots=True)
class BodyFields:
    """A prompt and what belongs to it."""

    api: str
    segments: tuple[Segment, ...]
    model: str | None = None
    provider: str | None = None  # None: the response or the model's name decides
    cache_key: str | None = None
    retention_s: float | None = None  # None: the provider's usual
    cache_scope: str = ""
    conversation: str | None = None
    # Response or conversation whose messages the server puts in front.
    history_id: str | None = None
    has_full_text: bool = True
    note: str | None = None  # why the text is not full
    compares_with: str | None = None  # message id for which a diagnosis was asked


def openai_fields(api: str, body: Mapping[str, Any], segments: Iterable[Segment]) -> BodyFields:
    """A prompt with the fields that all APIs of OpenAI have."""
    return BodyFields(
        api=api,
        segments=tuple(segments),
        model=text_or_none(body.get("model")),
        cache_key=text_or_none(body.get("prompt_cache_key")),
        retention_s=DAY_S if body.get("prompt_cache_retention") == "24h" else None,
        cache_scope=scope_of(body),
        conversation=conversation_of(body),
    )


def text_or_none(value: object) -> str | None:
    """A non-empty string, else None."""
    return value if isinstance(value, str) and value else None


def conversation_of(body: Mapping[str, Any]) -> str | None:
    """Conversation that a body's metadata names."""
    metadata = body.get("metadata")
    for holder in (body, metadata):
        if isinstance(holder, Mapping):
            for key in _CONVERSATION_KEYS:
                conversation = text_or_none(holder.get(key))
                if conversation is not None:
                    return conversation
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    return _session_of_user(user) if isinstance(user, str) else None


def _session_of_user(user: str) -> str | None:
    """Session id that coding agents put into `metadata.user_id`, as a suffix or in JSON."""
    match = _CLAUDE_CODE_USER.search(user)
    if match is not None:
        return match[1]
    if user.startswith("{"):
        try:
            fields = json.loads(user)
        except (ValueError, RecursionError):
            return None
        return text_or_none(fields.get("session_id")) if isinstance(fields, dict) else None
    return None


def scope_of(body: Mapping[str, Any]) -> str:
    """Salt and adapter of vLLM, SGLang and Ramify, which split the cache."""
    names = ("cache_salt", "extra_key", "lora_name", "lora_path")
    parts = [f"{name}={body[name]}" for name in names if text_or_none(body.get(name))]
    return " ".join(parts)


def is_cut(segments: tuple[Segment, ...]) -> bool:
    """Whether a gateway cut a text and left its marker."""
    return any(
        segment.text.endswith(_CUT_ENDS)
        or ("litellm_truncated" in segment.text and _SPLICE.search(segment.text) is not None)
        for segment in segments
    )
