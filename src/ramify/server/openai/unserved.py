"""Fields of OpenAI's API and of other servers' that are not served here: refused or ignored."""

from __future__ import annotations

from ramify.server.unserved_fields import Refused, UnservedFields

# They do not change the answer.
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
_STOPS = Refused(hint="send stop")
_REFUSED = {
    "custom_logit_processor": Refused(hint="send logit_bias or allowed_token_ids"),
    "dry_multiplier": Refused((0,), hint="send frequency_penalty"),
    "early_stopping": Refused(hint="there is no beam search here"),
    "guidance_scale": Refused((1,)),
    "length_penalty": Refused((0, 1), hint="there is no beam search here"),
    "logit_processors": Refused(hint="send logit_bias or allowed_token_ids"),
    "logits_processors": Refused(hint="send logit_bias or allowed_token_ids"),
    "lora_path": Refused(hint="start a server with that model"),
    "max_length": _LENGTH,
    "max_new_tokens": _LENGTH,
    "mirostat": Refused((0,)),
    "mm_processor_kwargs": Refused(hint="only text is served"),
    "n_predict": _LENGTH,
    "no_repeat_ngram_size": Refused((0,), hint="send frequency_penalty"),
    "num_beams": Refused((1,), hint="there is no beam search here"),
    "num_predict": _LENGTH,
    "prompt_embeds": Refused(hint="send text or token ids"),
    "repeat_penalty": Refused((1,), hint="send repetition_penalty"),
    "return_hidden_states": Refused(),
    "session_params": Refused(),
    "stop_regex": Refused(hint="send stop"),
    "stop_sequences": _STOPS,
    "tfs_z": Refused((1,)),
    "typical_p": Refused((1,)),
    "use_beam_search": Refused(hint="there is no beam search here"),
    "watermark": Refused(),
    "xtc_probability": Refused((0,)),
}
CHAT_FIELDS = UnservedFields(
    ignored=_IGNORED,
    refused=_REFUSED
    | {
        "add_special_tokens": Refused(hint="the chat template writes them"),
        "audio": Refused(hint="only text is served"),
        "best_of": Refused((1,), hint="send n"),
        "chat_template": Refused(hint="the model's own is used"),
        "documents": Refused(hint="send them in a message"),
        "function_call": Refused(("none", "auto"), hint="send tools and tool_choice"),
        "functions": Refused(hint="send tools"),
        "prompt": Refused(hint="send it to /v1/completions, or send messages"),
        "suffix": Refused(),
        "web_search_options": Refused(hint="send tools that the client runs"),
    },
)
COMPLETION_FIELDS = UnservedFields(
    ignored=_IGNORED,
    refused=_REFUSED | {"messages": Refused(hint="send them to /v1/chat/completions")},
)
RESPONSES_FIELDS = UnservedFields(
    refused={
        "max_completion_tokens": Refused(hint="send max_output_tokens"),
        "max_tokens": Refused(hint="send max_output_tokens"),
        "messages": Refused(hint="send input"),
        "n": Refused((1,), hint="send several requests"),
        "response_format": Refused(hint="send text.format"),
        "stop": Refused(hint="send the request to /v1/chat/completions"),
    },
)
