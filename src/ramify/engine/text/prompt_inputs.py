"""The forms in which callers give prompts, made one: token ids with options for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

from ramify.errors import EmptyPromptError, InvalidParamsError, RequestError
from ramify.outputs import CacheReport, Completion, FinishReason, RequestMetrics, RequestOutput
from ramify.params import SamplingParams

if TYPE_CHECKING:
    from ramify.engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Prefix = Prompt | Sequence[Message]  # a text, token ids, or the messages of a conversation
T = TypeVar("T")


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt, text or ids, becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    found: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(found, Sequence) or isinstance(found, bytes | bytearray):
        raise InvalidParamsError("prompts", prompts, "a text, token ids, or a list of them")
    if len(found) and all(isinstance(one, Integral) for one in found):
        return [found]
    return list(found)


def params_for(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """One for each of `count` prompts."""
    if params is None:
        return [SamplingParams()] * count
    if not isinstance(params, SamplingParams | list | tuple):
        raise InvalidParamsError("params", params, "SamplingParams, or a list of them")
    return broadcast_option("params", params, count)


def broadcast_option(name: str, value: T | Sequence[T], count: int) -> list[T]:
    """An option for each of `count` prompts: a list or tuple has one for each, else it is for all.

    Raises:
        InvalidParamsError: a list of another length.
    """
    if not isinstance(value, list | tuple):
        one: Any = value
        return [one] * count
    if len(value) != count:
        raise InvalidParamsError(
            name, f"{len(value)} of them", f"one, or as many as the {count} prompts"
        )
    return list(value)


def encode(prompt: Prompt, tokenizer: Tokenizer | None) -> Sequence[int]:
    """The token ids of a prompt.

    Raises:
        RequestError: an empty text, or a text for a model without tokenizer.
    """
    if not isinstance(prompt, str):
        return prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not prompt:
        raise EmptyPromptError
    if tokenizer is None:
        raise InvalidParamsError(
            "prompt", "text", "token ids: the checkpoint has no tokenizer.json"
        )
    return tokenizer.encode(prompt)


def encode_chat(
    messages: Sequence[Message], tokenizer: Tokenizer | None, **template_options: Any
) -> Sequence[int]:
    """The token ids of a conversation, through the model's chat template.

    Raises:
        RequestError: no tokenizer, no template, or it refuses the messages.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidParamsError("messages", messages, "a conversation of at least 1 message")
    if tokenizer is None:
        raise InvalidParamsError("messages", "given", "token ids: the model has no tokenizer")
    return tokenizer.encode_chat(messages, **template_options)


def prefix_token_ids(
    prefix: Prefix,
    tokenizer: Tokenizer | None,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool,
) -> Sequence[int]:
    """The token ids of a prefix in any form.

    Raises:
        RequestError: it is empty or cannot be tokenised.
    """
    found: Any = prefix
    if isinstance(found, list | tuple) and found and isinstance(found[0], Mapping):
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        return encode_chat(found, tokenizer, add_generation_prompt=add_generation_prompt, **options)
    return encode(found, tokenizer)


def stable_prefix_ids(
    prefix: Prefix, tokenizer: Tokenizer | None, tools: Sequence[Mapping[str, Any]] = ()
) -> Sequence[int]:
    """The ids that a prompt begins with if it begins with `prefix`.

    Not the last one of a text: with more text behind it, it could be another one.
    """
    ids = prefix_token_ids(prefix, tokenizer, tools, add_generation_prompt=False)
    return ids[:-1] if isinstance(prefix, str) and len(ids) > 1 else ids


def refused_output(prompt: object, error: RequestError) -> RequestOutput:
    """The output of a prompt that was never queued."""
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(
        request_id=-1,
        prompt=text,
        prompt_token_ids=(),
        completions=(Completion("", (), FinishReason.ERROR),),
        metrics=RequestMetrics(0.0, None, 0.0, None),
        cache=CacheReport(0, 0, 0),
        error=error,
    )
