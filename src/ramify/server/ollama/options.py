"""Options of a request: sampling, format, thinking, prompt cache.

What an answer cannot have is refused. Options of Ollama's older samplers are ignored with a warning, as
Ollama ignores them by now; those of loading a model silently, as they do not change the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ramify.models.configs.sampling_defaults import SamplingDefaults
from ramify.params import SamplingParams, StructuredOutput
from ramify.server.conversation.conversation import CacheOptions, Conversation
from ramify.server.errors import ApiError
from ramify.server.grammars.constraint import schema_format
from ramify.server.http.request_body import convert_value
from ramify.server.ollama.names import check_model
from ramify.server.ollama.protocol import AnswerRequest, ModelOptions
from ramify.server.request_fields.reasoning_options import ReasoningOptions
from ramify.server.request_fields.unsupported_fields import MAX_NAMED, unknown_warning
from ramify.server.service import RequestService

# Of a request and a checkpoint that do not set them.
OLLAMA_DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
# They do not change the answer, or only beside an option that is ignored.
SILENT = frozenset(
    "embedding_only draft_num_predict f16_kv logits_all low_vram main_gpu mirostat_eta mirostat_tau "
    "num_batch num_gpu num_keep num_thread numa use_mlock use_mmap vocab_only".split()
)
# Ignored with a warning → values that change nothing.
OTHER_SAMPLERS: Mapping[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "penalize_newline": (True,),
    "tfs_z": (1,),
    "typical_p": (1,),
}
KNOWN = frozenset(ModelOptions.__struct_fields__)
THINK_LEVELS = ("low", "medium", "high", "max")
# Variables of chat templates that turn reasoning on.
SWITCHES = frozenset({"enable_thinking", "thinking", "reasoning", "reasoning_effort"})


def read_options(request: AnswerRequest, service: RequestService) -> Conversation:
    """What a request says beside its messages.

    Raises:
        ApiError, RequestError: an option is not served.
    """
    warnings: list[str] = []
    model = check_model(request.model, service)
    options = model_options(request.options, service, warnings)
    return Conversation(
        model=model,
        messages=(),
        continues_answer=None,
        answer_format=answer_format(request.format, warnings),
        format_path="format",
        reasoning=reasoning_options(request.think, model, service),
        sampling=sampling_params(request, options, service.sampling_defaults),
        cache=CacheOptions(
            salt=request.cache_salt or "",
            session=request.session_id or "",
            ends_session=bool(request.end_session),
        ),
        priority=request.priority or 0,
        is_prewarm=options.num_predict == 0,
        is_streamed=request.stream is not False,
        is_remembered=False,  # clients see no id with which to name it
        warnings=tuple(warnings),
    )


def model_options(
    fields: Mapping[str, Any] | None, service: RequestService, warnings: list[str]
) -> ModelOptions:
    """The options that are honoured; what is ignored is appended to `warnings`.

    Raises:
        ApiError: 400, a value is not possible.
    """
    given = {name: value for name, value in (fields or {}).items() if value is not None}
    known = {name: _plain(value) for name, value in given.items() if name in KNOWN}
    options: ModelOptions = convert_value(known, ModelOptions, "options")
    for name, neutral in OTHER_SAMPLERS.items():
        if name in given and given[name] not in neutral:
            warnings.append(f"options.{name} is ignored: there is no such sampler here")
    has_penalty = any(
        (options.presence_penalty, options.frequency_penalty, (options.repeat_penalty or 1) != 1)
    )
    if has_penalty and (options.repeat_last_n or -1) > 0:
        warnings.append("options.repeat_last_n is ignored: penalties count all tokens")
    if options.num_ctx is not None and options.num_ctx > service.max_request_len:
        is_pool = service.max_request_len < service.max_model_len
        warnings.append(
            f"options.num_ctx is ignored: the context has {service.max_request_len} tokens; start the "
            f"server with a larger {'--kv-cache-tokens' if is_pool else '--max-model-len'}"
        )
    unknown = [name for name in given if name not in KNOWN | SILENT | OTHER_SAMPLERS.keys()]
    if unknown:
        warnings.append(unknown_warning([f"options.{name}" for name in unknown[: MAX_NAMED + 1]]))
    return options


def _plain(value: Any) -> Any:
    """A number without fraction as an integer, which also passes where a float is allowed."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def sampling_params(
    request: AnswerRequest, options: ModelOptions, defaults: SamplingDefaults
) -> SamplingParams:
    """The sampling parameters, without the answer's format.

    Args:
        defaults: of the checkpoint; what it does not set either has Ollama's default.
    """
    missing = {name: value for name, value in OLLAMA_DEFAULTS.items() if name not in defaults.named}
    has_penalties = options.repeat_last_n != 0
    limit = options.num_predict
    stop = [options.stop] if isinstance(options.stop, str) else options.stop or ()
    return SamplingParams(
        **replace(defaults, **missing).filled(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repeat_penalty if has_penalties else 1.0,
        ),
        presence_penalty=(options.presence_penalty or 0.0) * has_penalties,
        frequency_penalty=(options.frequency_penalty or 0.0) * has_penalties,
        seed=None if options.seed is None or options.seed < 0 else options.seed,
        max_tokens=None if limit is None or limit < 0 else max(1, limit),
        stop=[text for text in stop if text],
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def answer_format(
    value: str | dict[str, Any] | None, warnings: list[str]
) -> StructuredOutput | None:
    """The format that the answer must match; None if the request has none.

    Raises:
        ApiError: 400, it is neither "json" nor a JSON schema.
    """
    if value is None or value == "":
        return None
    if value == "json":
        return StructuredOutput(json_object=True)
    if isinstance(value, str):
        raise ApiError(
            400, f'{value[:50]!r} is no format; send "json" or a JSON schema', param="format"
        )
    return schema_format(value, "format", warnings, strict=False)


def reasoning_options(
    think: bool | str | None, model: str, service: RequestService
) -> ReasoningOptions:
    """Whether and how much the model thinks.

    Raises:
        ApiError: 400, it is no level, or the model cannot think.
    """
    if isinstance(think, str) and think not in THINK_LEVELS:
        levels = ", ".join(f'"{level}"' for level in THINK_LEVELS)
        raise ApiError(
            400, f"{think[:50]!r} is no level; send true, false, {levels}", param="think"
        )
    if think and not supports_thinking(service):
        raise ApiError(400, f'"{model}" does not support thinking; leave it out', param="think")
    return ReasoningOptions(
        is_enabled=None if think is None else bool(think),
        effort=think if isinstance(think, str) else None,
    )


def supports_thinking(service: RequestService) -> bool:
    """Whether the chat template reads or writes reasoning."""
    has_switch = bool(SWITCHES & service.tokenizer.chat_template_names)
    return has_switch or service.output_format.reasoning.name != "none"
