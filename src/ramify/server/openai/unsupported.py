"""Fields of an API, of the other APIs and of other servers that a request type does not have.

What would change the answer is refused, with the field to send in its place.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ramify.foreign_names import PARAM_NAMES, field_advice
from ramify.server.openai.protocol import Sampling
from ramify.server.openai.responses.protocol import ResponsesRequest
from ramify.server.request_fields.unsupported_fields import Refused, UnsupportedFields

# Fields that do not change the answer.
_IGNORED = frozenset(
    (
        "cache_prompt",
        "id_slot",
        "keep_alive",
        "metadata",
        "prediction",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
    )
)
_LENGTH = Refused(hint="send max_tokens")
_SYSTEM = Refused(hint="send a message of the role system")
_FORMAT = Refused(({"format": {"type": "text"}},), hint="send response_format")
_FROM_STORE = Refused(hint="send the request to /v1/responses")
# Sampling parameters of other engines → their values that change nothing.
_FOREIGN_PARAMS = {
    "custom_logit_processor": (),
    "dry_multiplier": (0,),
    "early_stopping": (),
    "guidance_scale": (1,),
    "length_penalty": (0, 1),
    "logit_processors": (),
    "logits_processors": (),
    "max_length": (),
    "max_new_tokens": (),
    "mirostat": (0,),
    "n_predict": (),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_predict": (),
    "repeat_penalty": (1,),
    "stop_regex": (),
    "stop_sequences": (),
    "tfs_z": (1,),
    "typical_p": (1,),
    "use_beam_search": (),
    "xtc_probability": (0,),
}
_REFUSED = {
    name: Refused(neutral, hint=field_advice(PARAM_NAMES[name]))
    for name, neutral in _FOREIGN_PARAMS.items()
} | {
    "lora_path": Refused(hint="start a server with that model"),
    "mm_processor_kwargs": Refused(hint="only text is served"),
    "prompt_embeds": Refused(hint="send text or token ids"),
    "return_hidden_states": Refused(),
    "session_params": Refused(),
    "watermark": Refused(),
}
CHAT_FIELDS = UnsupportedFields(
    ignored=_IGNORED,
    refused=_REFUSED
    | {
        "add_special_tokens": Refused(hint="the chat template writes them"),
        "audio": Refused(hint="only text is served"),
        "best_of": Refused((1,), hint=field_advice(PARAM_NAMES["best_of"])),
        "chat_template": Refused(hint="the model's own is used"),
        "conversation": _FROM_STORE,
        "function_call": Refused(("none", "auto"), hint="send tools and tool_choice"),
        "functions": Refused(hint="send tools"),
        "input": Refused(hint="send messages"),
        "instructions": _SYSTEM,
        "max_output_tokens": _LENGTH,
        "output_config": _FORMAT,
        "output_format": _FORMAT,
        "previous_response_id": _FROM_STORE,
        "prompt": Refused(hint="send it to /v1/completions, or send messages"),
        "suffix": Refused(),
        "system": _SYSTEM,
        "text": _FORMAT,
        "web_search_options": Refused(hint="send tools that the client runs"),
    },
)
_CHAT_ONLY = Refused(hint="send the request to /v1/chat/completions")
COMPLETION_FIELDS = UnsupportedFields(
    ignored=_IGNORED,
    refused=_REFUSED
    | {
        "chat_template": _CHAT_ONLY,
        "documents": _CHAT_ONLY,
        "input": Refused(hint="send prompt"),
        "instructions": _CHAT_ONLY,
        "max_output_tokens": _LENGTH,
        "messages": _CHAT_ONLY,
        "prefix": _CHAT_ONLY,
        "system": _CHAT_ONLY,
        "tool_choice": Refused(("none", "auto"), hint="send the request to /v1/chat/completions"),
        "tools": _CHAT_ONLY,
    },
)
# Field of both completion endpoints → its values that change nothing.
_NEUTRAL = {
    "frequency_penalty": (0,),
    "max_tokens": (-1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "top_k": (0, -1),
}
# Fields of both completion endpoints that leave the answer's text as it is: an API without them treats
# them as unknown.
_NO_EFFECT = frozenset(
    "model user priority session_id end_session stream_options prompt_cache_key prompt_cache_options "
    "prompt_cache_retention return_token_ids return_tokens_as_token_ids".split()
)


def refused_elsewhere(kind: type[msgspec.Struct], hints: Mapping[str, str]) -> dict[str, Refused]:
    """Fields of completion endpoints that another API refuses, since it does not have them.

    Args:
        kind: the request type of that API.
        hints: field → what to send in its place; by default, the request to `/v1/chat/completions`.
    """
    chat = "send the request to /v1/chat/completions"
    refused = {name: Refused(field.neutral) for name, field in _REFUSED.items()}
    for field in msgspec.structs.fields(Sampling):
        refused[field.name] = Refused(_NEUTRAL.get(field.name, ()), hint=chat)
    for name, hint in hints.items():
        refused[name] = Refused(refused.get(name, Refused()).neutral, hint=hint)
    served = _NO_EFFECT.union(field.name for field in msgspec.structs.fields(kind))
    return {name: field for name, field in refused.items() if name not in served}


RESPONSES_FIELDS = UnsupportedFields(
    refused=refused_elsewhere(
        ResponsesRequest,
        {
            "chat_template": "the model's own is used",
            "enable_thinking": "send reasoning.effort",
            "functions": "send tools",
            "max_completion_tokens": "send max_output_tokens",
            "max_new_tokens": "send max_output_tokens",
            "max_tokens": "send max_output_tokens",
            "messages": "send input",
            "n": "send several requests",
            "output_config": "send text.format",
            "output_format": "send text.format",
            "reasoning_effort": "send reasoning.effort",
            "response_format": "send text.format",
            "system": "send instructions",
            "thinking": "send reasoning.effort",
        },
    ),
)
_ALL_OF_RESPONSES = frozenset(field.name for field in msgspec.structs.fields(ResponsesRequest))
# `input_tokens` and `compact` get the body of a whole request: fields that they do not have are ignored.
INPUT_FIELDS = UnsupportedFields(ignored=_ALL_OF_RESPONSES, refused=RESPONSES_FIELDS.refused)
