"""Prompts in any form (text, token ids, messages) to token ids; options to one per prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

from ramify.counts import counted
from ramify.errors import (
    EmptyPromptError,
    InvalidParamsError,
    RequestError,
    UnknownParamError,
)
from ramify.foreign_names import CALL_NAMES, PARAM_NAMES, python_advice
from ramify.outputs import (
    REFUSED_ID,
    CacheReport,
    Completion,
    FinishReason,
    RequestMetrics,
    RequestOutput,
)
from ramify.params import SAMPLING_FIELDS, SamplingParams

if TYPE_CHECKING:
    from ramify.engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Prefix = Prompt | Sequence[Message]  # a text, token ids, or the messages of a conversation
T = TypeVar("T")


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from a single prompt (text or ids) or several."""
    if isinstance(prompts, str):
        return [prompts]
    items: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(items, Sequence) or isinstance(items, bytes | bytearray):
        raise InvalidParamsError("prompts", prompts, "a text, token ids, or a list of either")
    if len(items) and all(isinstance(item, Integral) for item in items):
        return [items]
    return list(items)


def params_for(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """`count` SamplingParams, from one for all or a list; None is the default."""
    if params is None:
        return [SamplingParams()] * count
    items = params if isinstance(params, list | tuple) else [params]
    for item in items:
        if not isinstance(item, SamplingParams):
            raise InvalidParamsError(
                "params", item, "SamplingParams, or a list with one for each prompt"
            )
    return broadcast_option("params", params, count)


def broadcast_option(name: str, value: T | Sequence[T], count: int) -> list[T]:
    """A list of `count` values of an option: `value` as it is if a list or tuple, else repeated.

    Raises:
        InvalidParamsError: a list of another length.
    """
    if not isinstance(value, list | tuple):
        scalar: Any = value
        return [scalar] * count
    if len(value) != count:
        raise InvalidParamsError(
            name, counted(len(value), "value"), f"one value, or one for each prompt, {count}"
        )
    return list(value)


def encode(prompt: Prompt, tokenizer: Tokenizer | None) -> Sequence[int]:
    """Token ids of a prompt: a text is tokenised, ids are returned as they are.

    Raises:
        RequestError: an empty text, or a text for a model without tokenizer.
    """
    if not isinstance(prompt, str):
        return prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not prompt:
        raise EmptyPromptError
    if tokenizer is None:
        raise InvalidParamsError("prompt", "text", "token ids: the checkpoint has no tokenizer")
    return tokenizer.encode(prompt)


def check_template_options(options: Mapping[str, Any]) -> None:
    """Refuse arguments of `chat` that templates do not read: sampling parameters, other engines' names.

    Raises:
        UnknownParamError: it names the argument, and what to use in its place.
    """
    for name in options:
        if name in CALL_NAMES:
            advice = python_advice(CALL_NAMES[name])
        elif name in SAMPLING_FIELDS:
            advice = "give it to SamplingParams"
        elif name in PARAM_NAMES and name != "tools":
            advice = f"of SamplingParams; {python_advice(PARAM_NAMES[name])}"
        else:
            continue
        raise UnknownParamError("chat", name, (), advice)


def encode_chat(
    messages: Sequence[Message], tokenizer: Tokenizer | None, **template_options: Any
) -> Sequence[int]:
    """Token ids of a conversation, rendered by the model's chat template.

    Raises:
        RequestError: no tokenizer, no template, or it refuses the messages.
    """
    check_template_options(template_options)
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidParamsError("messages", messages, "a conversation of at least 1 message")
    if tokenizer is None:
        raise InvalidParamsError("messages", "given", "token ids: the model has no tokenizer")
    return tokenizer.encode_chat(messages, **template_options)


def chat_prompts(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    tokenizer: Tokenizer | None,
    template_options: Mapping[str, Any],
) -> list[Callable[[], Sequence[int]]]:
    """Calls that return the token ids of one conversation, or of each of several.

    Each renders its own: a conversation that the template refuses does not stop the others.

    Raises:
        InvalidParamsError: what is no list of messages, or a model without tokenizer.
        UnknownParamError: see `check_template_options`.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidParamsError("messages", messages, "a conversation of at least 1 message")
    if tokenizer is None:
        raise InvalidParamsError("messages", "given", "token ids: the model has no tokenizer")
    check_template_options(template_options)
    chats: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
    return [partial(encode_chat, chat, tokenizer, **template_options) for chat in chats]


def prefix_token_ids(
    prefix: Prefix,
    tokenizer: Tokenizer | None,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool,
) -> Sequence[int]:
    """Token ids of a text, of ids, or of the messages of a conversation with its tools.

    Raises:
        RequestError: it is empty or cannot be tokenised.
    """
    items: Any = prefix
    if isinstance(items, list | tuple) and items and isinstance(items[0], Mapping):
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        return encode_chat(items, tokenizer, add_generation_prompt=add_generation_prompt, **options)
    return encode(items, tokenizer)


def stable_prefix_ids(
    prefix: Prefix, tokenizer: Tokenizer | None, tools: Sequence[Mapping[str, Any]] = ()
) -> Sequence[int]:
    """Token ids that every prompt beginning with `prefix` begins with.

    The last token of a text is left out: more text after it could change it.
    """
    ids = prefix_token_ids(prefix, tokenizer, tools, add_generation_prompt=False)
    return ids[:-1] if isinstance(prefix, str) and len(ids) > 1 else ids


def refused_output(prompt: object, error: RequestError) -> RequestOutput:
    """The output, with `error`, of a prompt that was never queued."""
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(
        request_id=REFUSED_ID,
        prompt=text,
        prompt_token_ids=(),
        completions=(Completion("", (), FinishReason.ERROR),),
        metrics=RequestMetrics(0.0, None, 0.0, None),
        cache=CacheReport(0, 0, 0),
        error=error,
    )
