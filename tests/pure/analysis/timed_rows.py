"""Rows of logs with times and usage, as SDK wrappers and gateways write them. Stdlib only."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.pure.analysis.planted_bodies import Body
from tests.pure.analysis.planted_timing import TimedRequest


def iso(at: float) -> str:
    """UTC, as JavaScript writes it."""
    moment = dt.datetime.fromtimestamp(at, dt.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _model(request: TimedRequest) -> str:
    return request.sent.answered_by or str(request.body["model"])


def anthropic_message(request: TimedRequest) -> Body:
    """A response of Anthropic's SDK; `input_tokens` is the rest behind the last breakpoint."""
    bill = request.bill
    five_minutes = bill.num_written - bill.num_written_1h
    return {
        "id": f"msg_{request.number:024d}", "type": "message", "role": "assistant",
        "model": _model(request), "content": [{"type": "text", "text": "Done."}],
        "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {
            "input_tokens": request.num_input - bill.num_read - bill.num_written,
            "cache_creation_input_tokens": bill.num_written,
            "cache_read_input_tokens": bill.num_read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": five_minutes,
                "ephemeral_1h_input_tokens": bill.num_written_1h,
            },
            "output_tokens": 7, "service_tier": "standard",
        },
    }  # fmt: skip


def chat_completion(request: TimedRequest) -> Body:
    """A response of OpenAI's SDK; reads are inside `prompt_tokens`."""
    usage: Body = {
        "prompt_tokens": request.num_input, "completion_tokens": 7,
        "total_tokens": request.num_input + 7,
        "prompt_tokens_details": {"cached_tokens": request.bill.num_read, "audio_tokens": 0},
    }  # fmt: skip
    if "deepseek" in request.body["model"]:
        usage["prompt_cache_hit_tokens"] = request.bill.num_read
        usage["prompt_cache_miss_tokens"] = request.num_input - request.bill.num_read
    return {
        "id": f"chatcmpl-{request.number:024d}", "object": "chat.completion",
        "created": int(request.start_s), "model": _model(request),
        "choices": [{
            "index": 0, "finish_reason": "stop", "logprobs": None,
            "message": {"role": "assistant", "content": "Done.", "refusal": None},
        }],
        "usage": usage,
    }  # fmt: skip


def response_object(request: TimedRequest) -> Body:
    """A response of OpenAI's Responses API."""
    return {
        "id": f"resp_{request.number:024d}", "object": "response", "status": "completed",
        "created_at": int(request.start_s), "model": _model(request), "output": [],
        "usage": {
            "input_tokens": request.num_input, "output_tokens": 7,
            "total_tokens": request.num_input + 7,
            "input_tokens_details": {
                "cached_tokens": request.bill.num_read,
                "cache_write_tokens": request.bill.num_written,
            },
        },
    }  # fmt: skip


def _response(request: TimedRequest) -> Body:
    if "max_tokens" in request.body:
        return anthropic_message(request)
    return response_object(request) if "input" in request.body else chat_completion(request)


def wrapped(request: TimedRequest) -> Body:
    """A wrapper around an SDK's call."""
    sent = request.sent
    return {
        "request": request.body, "response": _response(request), "start_time": iso(request.start_s),
        "ttft_ms": round(sent.wait * 1000), "duration_ms": round((sent.wait + sent.answer) * 1000),
        "replica": sent.replica,
    }  # fmt: skip


def without_usage(request: TimedRequest) -> Body:
    """The same of a wrapper that keeps no answers: times alone."""
    row = wrapped(request)
    row.pop("response")
    return row


def litellm(request: TimedRequest) -> Body:
    """A callback payload of LiteLLM for a chat completion."""
    sent, body = request.sent, request.body
    provider = "hosted_vllm" if "Qwen" in body["model"] else "openai"
    rest = {key: value for key, value in body.items() if key not in {"model", "messages"}}
    return {
        "id": f"chatcmpl-{request.number:024d}", "trace_id": f"trace-{request.number}",
        "call_type": "acompletion", "stream": True, "status": "success",
        "custom_llm_provider": provider, "prompt_tokens": request.num_input, "completion_tokens": 7,
        "total_tokens": request.num_input + 7,
        "startTime": request.start_s, "completionStartTime": request.start_s + sent.wait,
        "endTime": request.start_s + sent.wait + sent.answer,
        "model": body["model"], "model_group": body["model"],
        "model_id": f"deployment-{sent.replica}", "api_base": f"https://{sent.replica}.example.com/v1",
        "metadata": {"user_api_key_hash": "0f" * 32}, "cache_hit": False, "request_tags": [],
        "messages": body["messages"], "response": chat_completion(request),
        "model_parameters": rest, "hidden_params": {},
    }  # fmt: skip


def helicone(request: TimedRequest) -> Body:
    """A row of Helicone; its delay is that of the whole answer."""
    sent = request.sent
    return {
        "request_id": f"helicone-{request.number}", "request_created_at": iso(request.start_s),
        "request_body": request.body, "request_path": "https://api.anthropic.com/v1/messages",
        "request_user_id": None, "request_properties": {}, "request_model": request.body["model"],
        "response_body": anthropic_message(request), "response_status": 200,
        "response_model": _model(request), "provider": "ANTHROPIC",
        "delay_ms": round((sent.wait + sent.answer) * 1000),
        "time_to_first_token": round(sent.wait * 1000),
    }  # fmt: skip


ROWS: dict[str, tuple[str, Callable[[TimedRequest], Any]]] = {
    "anthropic": ("anthropic", wrapped),
    "anthropic_times": ("anthropic", without_usage),
    "haiku": ("haiku", wrapped),
    "helicone": ("anthropic", helicone),
    "openai": ("openai", wrapped),
    "openai_litellm": ("openai", litellm),
    "responses": ("responses", wrapped),
    "deepseek": ("deepseek", wrapped),
    "vllm": ("vllm", litellm),
}  # vendor and row by the log's name


def write_rows(
    requests: Sequence[TimedRequest], row: Callable[[TimedRequest], Any], path: Path
) -> None:
    """A line for each request, in order of start."""
    lines = [json.dumps(row(request), ensure_ascii=False) for request in requests]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
