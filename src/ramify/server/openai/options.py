"""Options that all of OpenAI's endpoints share: sampling, response format, prompt cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ramify.engine.text.tokenizer import Tokenizer
from ramify.models.configs.sampling_defaults import SamplingDefaults
from ramify.params import MAX_BANNED_TOKENS, SamplingParams, StructuredOutput
from ramify.server.conversation.conversation import CacheOptions
from ramify.server.errors import ApiError
from ramify.server.generation import Generation
from ramify.server.history.stored_requests import fingerprint
from ramify.server.openai.protocol import ChatRequest, PromptCacheOptions, Sampling
from ramify.server.prompts.renderer import BREAKPOINT_TTL_S, MAX_BREAKPOINTS
from ramify.server.service import RequestService

# Kinds of `PromptDifference` that have a reason of their own: `model_changed`.
REPORTED_KINDS = (
    "model",
    "tools",
    "text_format",
    "reasoning_effort",
    "verbosity",
    "service_tier",
    "prompt_cache_key",
)


def sampling_params(
    request: Sampling,
    tokenizer: Tokenizer,
    defaults: SamplingDefaults,
    *,
    max_tokens: int | None,
    structured: StructuredOutput | None = None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The sampling parameters of a request; chat and completions have their own forms of the arguments.

    Args:
        defaults: values of the parameters that the request omits.

    Raises:
        ApiError, InvalidParamsError: a value is out of range, or two exclude each other.
    """
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError(
            400,
            "a stream has no logprobs of the prompt; send stream: false",
            param="prompt_logprobs",
        )
    bias: dict[int, float] = {}
    if request.logit_bias:
        try:
            bias = {int(token): value for token, value in request.logit_bias.items()}
        except ValueError as error:
            raise ApiError(400, "the keys must be token ids", param="logit_bias") from error
    return SamplingParams(
        **defaults.filled(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
        ),
        n=request.n or 1,
        seed=None if request.seed is None else request.seed % 2**63,
        max_tokens=max_tokens,
        structured=structured,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        min_tokens=request.min_tokens or 0,
        stop=[request.stop] if isinstance(request.stop, str) else request.stop or (),
        stop_token_ids=request.stop_token_ids or (),
        include_stop=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=bias,
        allowed_token_ids=request.allowed_token_ids or None,
        banned_sequences=banned_sequences(request.bad_words or (), tokenizer),
        keep_special_tokens=request.skip_special_tokens is False,
    )


def output_limit(name: str, limit: int | None) -> int | None:
    """The limit of the answer's tokens that a field sets; None if there is none.

    Raises:
        ApiError: it is 0.
    """
    if limit == 0:
        raise ApiError(400, "0 leaves no token for an answer; send at least 1", param=name)
    return None if limit == -1 else limit


def banned_sequences(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of words that must not occur: at the start of a text, and after a space.

    Raises:
        ApiError: 400, they have too many tokens.
    """
    sequences = []
    for word in words:
        for text in (word, " " + word.lstrip()):
            sequences.append(tokenizer.encode(text, add_special_tokens=False).tolist())
    num_tokens = sum(map(len, sequences))
    if num_tokens > MAX_BANNED_TOKENS:
        raise ApiError(
            400,
            f"the words have {num_tokens} tokens, with and without a space before; the limit is "
            f"{MAX_BANNED_TOKENS}; send fewer",
            param="bad_words",
        )
    return [ids for ids in sequences if ids]


def truncated_len(request: Sampling, service: RequestService) -> int | None:
    """Number of last tokens of a prompt that `truncate_prompt_tokens` keeps; None: all.

    -1 keeps as many as leave room for the answer.
    """
    num_tokens = request.truncate_prompt_tokens
    if num_tokens == 0:
        raise ApiError(400, "0 leaves nothing of the prompt", param="truncate_prompt_tokens")
    if num_tokens == -1:
        return max(1, service.max_request_len - max(1, request.max_tokens or 1))
    return num_tokens


def token_name(token: int, request: Sampling, tokenizer: Tokenizer) -> str:
    """A token's text in logprobs, or `token_id:N` if the request wants that."""
    if request.return_tokens_as_token_ids:
        return f"token_id:{token}"
    return tokenizer.token_text(token)


def breakpoint_ttl_s(request: Sampling) -> float:
    """Seconds for which the breakpoints of a request are pinned."""
    options = request.prompt_cache_options
    if options is not None and options.ttl is not None:
        return BREAKPOINT_TTL_S[options.ttl]
    return BREAKPOINT_TTL_S["24h" if request.prompt_cache_retention == "24h" else "30m"]


def cache_options(request: Sampling) -> CacheOptions:
    """Options of a request for the prompt cache.

    The implicit breakpoint at the prompt's end counts among `MAX_BREAKPOINTS`. It is cached in any case,
    and pinned only if the request sets a lifetime.
    """
    options = request.prompt_cache_options or PromptCacheOptions()
    cache = CacheOptions(
        salt=request.cache_salt or "",
        session=request.session_id or "",
        ends_session=bool(request.end_session),
    )
    if options.mode == "explicit":
        return replace(cache, shares_breakpoints_only=True)
    is_pinned = options.ttl is not None or bool(options.prewarm)
    is_pinned |= request.prompt_cache_retention == "24h"
    return replace(
        cache,
        max_breakpoints=MAX_BREAKPOINTS - 1,
        end_ttl_s=breakpoint_ttl_s(request) if is_pinned else None,
    )


def compared_options(request: Sampling) -> dict[str, str]:
    """The options that `first_difference` compares, by name."""
    options = {
        "prompt_cache_key": request.prompt_cache_key or "",
        "cache_salt": request.cache_salt or "",
    }
    if isinstance(request, ChatRequest):
        options["text_format"] = fingerprint(request.response_format)
        options["reasoning_effort"] = request.reasoning_effort or ""
        options["verbosity"] = request.verbosity or ""
        options["service_tier"] = request.service_tier or ""
        options["documents"] = fingerprint(request.documents or ())
        options["chat_template_kwargs"] = fingerprint(request.chat_template_kwargs or {})
    return options


def diagnostics(
    service: RequestService, request: Sampling, generation: Generation
) -> dict[str, Any] | None:
    """`prompt_cache_diagnostics`; None unless the request names a response to compare with."""
    options = request.prompt_cache_options
    if options is None or options.comparison_response_id is None:
        return None
    comparison = service.compare_with_earlier(generation, options.comparison_response_id)
    if comparison is None:
        return {"type": "comparison_response_not_found"}
    if comparison.is_fully_reused:
        return {"type": "cache_hit"}
    difference = comparison.difference
    if difference is None:
        return {"type": "unavailable"}  # the same prompt, but its prefix was evicted
    changed = difference.kind if difference.kind in REPORTED_KINDS else "input"
    return {
        "type": "cache_miss",
        "reason": f"{changed}_changed",
        "cache_missed_tokens": difference.missed_tokens,
        "comparison_reusable_tokens": difference.at_token,
        "segment": difference.path,  # not a field of OpenAI's
    }
