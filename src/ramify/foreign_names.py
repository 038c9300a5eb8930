"""Names of options in vLLM, SGLang, transformers and llama.cpp, each with the way to say it here.

One table for `LLM(...)`, `SamplingParams(...)`, the command line and the fields of HTTP requests. A name in
backticks is one of ours: the command line shows `max_num_seqs` as `--max-num-seqs`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_CONTEXT = "use `max_model_len`"
_POOL = "use `kv_cache_tokens` or `kv_cache_memory`"
_CPU = "Ramify runs on CPU; `device=cuda` computes on a GPU, which is not tested yet"
_ONE_PROCESS = "not served yet; `tensor_parallel_size` shares a model between processes"
_THREADS = "set OMP_NUM_THREADS in the environment"
_QUANTIZED = "use `quantize`; a checkpoint that is quantised says so itself"
_LORA = "LoRA is not served yet; merge the adapter into the weights"
_TIERS = "use `cache_dir` (disk), `cache_store` (a shared server) or `cache_host` (memory)"
_WEIGHTS_ELSEWHERE = "all weights are on one device; leave it out"
_REPLICAS = "--replicas N of ramify serve starts N engines behind one address"
_ROUTES_EVENTS = "--kv-events ADDRESS of ramify serve publishes what the cache stores and removes"
_NO_LOG_TEXT = (
    "the log has no text of a request; --record FILE of ramify serve keeps hashes of its tokens"
)
_NO_REMOTE_TOOLS = "the server runs no tools; the client does"
_NO_CUT = "a prompt that is too long is refused, never cut; leave it out"
_DRAFT_MODEL = "draft models are not served yet; `speculative=auto` drafts from the text"
_DRAFTS = "use `speculative` and `max_draft_tokens`"
_MODEL_ARGUMENT = "the model is the first argument"
_TOKENIZER = "the checkpoint's own tokenizer is used"
_TEMPLATE = "the checkpoint's own chat template is used"
_NO_CODE = "code of a checkpoint is never run; leave it out"
_NO_GRAPHS = "CUDA graphs are off unless `decode_graphs` is on; leave it out"
_NO_COMPILE = "the CPU kernels are compiled in any case; leave it out"
_MAPPED = "weights are read as the system needs; leave it out"
_ROPE = "the checkpoint's config.json says it"
_MEDIA = "image and audio inputs are not served yet"
_HUB_CACHE = "set HF_HUB_CACHE in the environment"
_SEED = "each request has a seed; leave it out"
_STRUCTURED = "install ramify[structured]; each request names its format"
_BY_DEFAULT = "on by default; leave it out"
_CALLS = "tool calls are on by default; leave it out"
_PROXY = "put a proxy with TLS before the server"

# Options of an engine or a server.
ENGINE_NAMES: Mapping[str, str] = {
    # sizes
    **dict.fromkeys(
        (
            "max_seq_len",
            "max_seq_length",
            "max_sequence_length",
            "context_length",
            "n_ctx",
            "ctx_size",
        ),
        _CONTEXT,
    ),
    "gpu_memory_utilization": _POOL,
    "mem_fraction_static": _POOL,
    "max_total_tokens": "use `kv_cache_tokens`",
    "kv_cache_memory_bytes": "use `kv_cache_memory`",
    "num_gpu_blocks_override": "use `kv_cache_tokens`",
    "block_size": "use `page_size`",
    "max_num_batched_tokens": "use `max_batch_tokens`",
    "chunked_prefill_size": "use `max_batch_tokens`",
    "max_prefill_tokens": "use `max_batch_tokens`",
    "n_batch": "use `max_batch_tokens`",
    "n_ubatch": "use `max_batch_tokens`",
    "ubatch_size": "use `max_batch_tokens`",
    "batch_size": "use `max_batch_tokens` (tokens per step) or `max_num_seqs` (requests)",
    "max_batch_size": "use `max_num_seqs`",
    "max_running_requests": "use `max_num_seqs`",
    "max_concurrent_requests": "use `max_num_seqs`",
    "n_parallel": "use `max_num_seqs`",
    "parallel": "use `max_num_seqs`",
    **dict.fromkeys(("max_queued_requests", "max_num_queued_reqs"), "use `max_waiting`"),
    "max_num_queued_tokens": "use `max_waiting_tokens`",
    "kv_unified": "all requests share one pool; leave it out",
    **dict.fromkeys(("context_shift", "keep", "allow_auto_truncate"), _NO_CUT),
    "kv_cache_dtype": "use `kv_dtype`",
    **dict.fromkeys(("cache_type_k", "cache_type_v", "type_k", "type_v"), "use `kv_dtype`"),
    # the cache
    "enable_prefix_caching": "the prefix cache is on by default; `prefix_cache=False` turns it off",
    "disable_radix_cache": "use `prefix_cache=False`",
    "cache_prompt": "the prefix cache is on by default; `prefix_cache=False` turns it off",
    "cache_reuse": "whole pages of a common prefix are reused by default; leave it out",
    "radix_eviction_policy": "use `policy`",
    "prefix_caching_hash_algo": "the cache compares tokens, not hashes; leave it out",
    "enable_deterministic_inference": "on by default: `exact`",
    "prefix_match_unit": "tokens inside a page are reused too: `partial_pages`",
    **dict.fromkeys(
        (
            "swap_space",
            "kv_transfer_config",
            "kv_offloading_size",
            "kv_offloading_backend",
            "enable_hierarchical_cache",
            "hicache_ratio",
            "hicache_size",
            "hicache_storage_backend",
            "enable_lmcache",
            "slot_save_path",
            "cache_ram",
        ),
        _TIERS,
    ),
    "hicache_write_policy": "pages are written when they are used again or evicted; leave it out",
    **dict.fromkeys(("cpu_offload_gb", "cpu_moe", "n_cpu_moe"), _WEIGHTS_ELSEWHERE),
    "kv_events_config": _ROUTES_EVENTS,
    **dict.fromkeys(
        ("swa_full", "ctx_checkpoints"), "a sliding window is a mask over the pages; leave it out"
    ),
    **dict.fromkeys(("slots", "props"), "see /v1/cache and /v1/activity of the server"),
    # scheduling
    "enable_chunked_prefill": "on by default: `max_batch_tokens` is the size of a chunk",
    "cont_batching": _BY_DEFAULT,
    "async_scheduling": "use `overlap`",
    "disable_overlap_schedule": "use `overlap=off`",
    **dict.fromkeys(
        ("scheduling_policy", "schedule_policy", "enable_priority_scheduling"),
        "each request has a priority; leave it out",
    ),
    "enable_mixed_chunk": "prompts and decodes share steps by default; leave it out",
    **dict.fromkeys(
        ("num_continuous_decode_steps", "stream_interval"),
        "each step's tokens are sent at once; leave it out",
    ),
    "watchdog_timeout": "use `step_timeout_s`",
    "warmup": _BY_DEFAULT,
    "warmups": "--warm FILE of ramify serve computes prompts before it is ready",
    "schedule_conservativeness": "the scheduler preempts when pages run out; leave it out",
    # devices and processes
    **dict.fromkeys(("device_map", "main_gpu", "gpu", "gpus", "num_gpus", "cuda"), _CPU),
    **dict.fromkeys(
        ("n_gpu_layers", "gpu_layers", "ngl", "split_mode", "tensor_split", "gpu_id"), _CPU
    ),
    **dict.fromkeys(
        (
            "pipeline_parallel_size",
            "distributed_executor_backend",
            "pp_size",
            "pp",
            "rpc",
            "disaggregation_mode",
        ),
        _ONE_PROCESS,
    ),
    **dict.fromkeys(
        ("data_parallel_size", "dp_size", "dp", "workers", "api_server_count"), _REPLICAS
    ),
    **dict.fromkeys(
        ("enable_expert_parallel", "ep_size"),
        "`tensor_parallel_size` gives each process its own experts",
    ),
    **dict.fromkeys(("tp_size", "tp"), "use `tensor_parallel_size`"),
    **dict.fromkeys(
        ("n_threads", "threads", "n_threads_batch", "threads_batch", "num_threads"), _THREADS
    ),
    "numa": _THREADS,
    **dict.fromkeys(
        ("enforce_eager", "disable_cuda_graph", "cuda_graph_max_bs", "cuda_graph_bs"), _NO_GRAPHS
    ),
    "max_seq_len_to_capture": _NO_GRAPHS,
    "disable_custom_all_reduce": "there is no such kernel; leave it out",
    "compilation_config": _NO_COMPILE,
    "enable_torch_compile": _NO_COMPILE,
    # model and weights
    "model_path": _MODEL_ARGUMENT,
    "model_name": _MODEL_ARGUMENT,
    "pretrained_model_name_or_path": _MODEL_ARGUMENT,
    "hf_repo": _MODEL_ARGUMENT,
    "hf_file": "download the GGUF file and name it as the model",
    "torch_dtype": "use `dtype`",
    **dict.fromkeys(
        ("quantization", "quantization_config", "torchao_config", "load_in_8bit", "load_in_4bit"),
        _QUANTIZED,
    ),
    "load_format": "the files say what they are; leave it out",
    "use_safetensors": "the files say what they are; leave it out",
    "low_cpu_mem_usage": _MAPPED,
    **dict.fromkeys(("use_mmap", "mmap", "no_mmap", "use_mlock", "mlock", "load_mode"), _MAPPED),
    "model_impl": "`ramify info` says which implementation runs; leave it out",
    "models_dir": "a server has one model; start one for each",
    "trust_remote_code": _NO_CODE,
    "download_dir": _HUB_CACHE,
    "hf_token": "set HF_TOKEN in the environment",
    "token": "set HF_TOKEN in the environment",
    "local_files_only": "use `offline`",
    "code_revision": _NO_CODE,
    "hf_overrides": "change the checkpoint's config.json",
    "override_kv": "change the file's metadata",
    **dict.fromkeys(
        ("tokenizer", "tokenizer_path", "tokenizer_mode", "tokenizer_revision"), _TOKENIZER
    ),
    "skip_tokenizer_init": "prompts may be token ids in any case; leave it out",
    **dict.fromkeys(("chat_template", "chat_format"), _TEMPLATE),
    **dict.fromkeys(
        ("default_chat_template_kwargs", "chat_template_kwargs", "reasoning_budget"),
        "each request may send chat_template_kwargs",
    ),
    "reasoning_format": "use --reasoning-parser of ramify serve",
    "jinja": _BY_DEFAULT,
    **dict.fromkeys(("rope_scaling", "rope_theta", "rope_freq_base", "rope_freq_scale"), _ROPE),
    **dict.fromkeys(
        (
            "enable_lora",
            "max_loras",
            "lora_modules",
            "lora_paths",
            "lora_path",
            "lora",
            "lora_base",
        ),
        _LORA,
    ),
    **dict.fromkeys(
        ("limit_mm_per_prompt", "mm_processor_kwargs", "mmproj", "enable_multimodal"), _MEDIA
    ),
    # attention and speculation
    "attn_implementation": "use `attention_backend`",
    "flash_attn": "use `attention_backend`; the default is right on CPU",
    "disable_sliding_window": "windows of the model are always kept; leave it out",
    **dict.fromkeys(
        (
            "speculative_config",
            "num_speculative_tokens",
            "speculative_algorithm",
            "speculative_num_draft_tokens",
            "spec_method",
            "spec_type",
            "spec_tokens",
            "spec_draft_n_max",
            "lookup_cache_dynamic",
        ),
        _DRAFTS,
    ),
    **dict.fromkeys(
        (
            "draft_model",
            "model_draft",
            "spec_model",
            "speculative_model",
            "speculative_draft_model_path",
        ),
        _DRAFT_MODEL,
    ),
    # answers
    "random_seed": _SEED,
    "max_logprobs": "requests may ask for up to 1,024 in Python, 20 over HTTP; leave it out",
    "logits_all": "use `prompt_logprobs` of SamplingParams",
    **dict.fromkeys(
        ("guided_decoding_backend", "structured_outputs_config", "grammar_backend"), _STRUCTURED
    ),
    **dict.fromkeys(
        ("task", "runner", "embedding", "embeddings", "is_embedding", "reranking"),
        "every model answers and embeds; leave it out",
    ),
    "use_cache": "K/V is always kept; `prefix_cache` shares it between requests",
    # the server
    "sampling_defaults": "use `generation_config`",
    "override_generation_config": "use `generation_config` with a directory that has the file",
    "exclude_tools_when_tool_choice_none": "use --drop-forbidden-tools of ramify serve",
    "enable_force_include_usage": "streams have usage if they ask with include_usage",
    "enable_custom_logit_processor": "not served; a request may send logit_bias",
    "tools": _NO_REMOTE_TOOLS,
    "enable_auto_tool_choice": _CALLS,
    "enable_reasoning": "reasoning is parsed by default; leave it out",
    "enable_prompt_tokens_details": _BY_DEFAULT,
    "enable_cache_report": _BY_DEFAULT,
    "enable_metrics": "on by default, at /metrics; leave it out",
    "metrics": "on by default, at /metrics; leave it out",
    "ui": _BY_DEFAULT,
    "kv_cache_metrics": "how long pages stay is not measured; leave it out",
    "alias": "use `served_model_name`",
    **dict.fromkeys(
        ("disable_log_requests", "enable_log_requests", "log_requests", "log_prompts_dir"),
        _NO_LOG_TEXT,
    ),
    **dict.fromkeys(
        ("otlp_traces_endpoint", "enable_trace"), "use --otlp-endpoint of ramify serve"
    ),
    "log_disable": "the log goes to stderr; redirect it",
    "admin_api_key": "use --admin-key of ramify serve",
    "cors_origins": "use --allowed-origins of ramify serve",
    "shutdown_timeout": "use --drain-seconds of ramify serve",
    "timeout": "a request has no time limit; leave it out",
    "threads_http": "requests are tokenised in threads of their own; leave it out",
    "disable_log_stats": "`log_format` chooses the form of the log; leave it out",
    "uvicorn_log_level": "`log_format` chooses the form of the log; leave it out",
    "log_level": "`log_format` chooses the form of the log; leave it out",
    "verbose": "leave it out",
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_key_file", "ssl_cert_file"), _PROXY),
    **dict.fromkeys(
        ("root_path", "fastapi_root_path", "api_prefix", "middleware"),
        "put a proxy before the server",
    ),
}

# Sampling parameters: what to use in their place, or why there is nothing.
PARAM_NAMES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "max_new_tokens",
            "max_length",
            "max_completion_tokens",
            "max_output_tokens",
            "n_predict",
            "num_predict",
            "predict",
        ),
        "use `max_tokens`",
    ),
    **dict.fromkeys(("min_new_tokens", "min_length"), "use `min_tokens`"),
    "do_sample": "use `temperature`; 0 is greedy",
    "temp": "use `temperature`",
    **dict.fromkeys(("repeat_penalty", "rep_pen"), "use `repetition_penalty`"),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "dry_multiplier", "encoder_repetition_penalty"),
        "use `frequency_penalty`",
    ),
    "repeat_last_n": "the penalties count the whole text; leave it out",
    **dict.fromkeys(
        ("typical_p", "typical", "tfs_z", "epsilon_cutoff", "eta_cutoff", "top_n_sigma"),
        "use `top_p` or `min_p`",
    ),
    **dict.fromkeys(
        ("mirostat", "mirostat_tau", "mirostat_eta", "xtc_probability", "xtc_threshold"),
        "use `temperature`, `top_p` or `min_p`",
    ),
    "dynatemp_range": "use `temperature`",
    "samplers": "the order of the samplers is fixed; leave it out",
    **dict.fromkeys(("guidance_scale", "penalty_alpha"), "leave it out"),
    **dict.fromkeys(("best_of", "num_return_sequences"), "use `n`"),
    **dict.fromkeys(
        (
            "use_beam_search",
            "beam_width",
            "num_beams",
            "num_beam_groups",
            "length_penalty",
            "early_stopping",
            "diversity_penalty",
        ),
        "there is no beam search here",
    ),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stop_regex"), "use `stop`"),
    "no_stop_trim": "use `include_stop`",
    "include_stop_str_in_output": "use `include_stop`",
    "eos_token_id": "use `stop_token_ids`",
    "pad_token_id": "requests are not padded; leave it out",
    "bos_token_id": "the tokenizer and the chat template write it; leave it out",
    "bad_words": "use `banned_sequences` of token ids",
    "bad_words_ids": "use `banned_sequences`",
    "suppress_tokens": "use `logit_bias`, or `banned_sequences`",
    **dict.fromkeys(
        ("logits_processors", "logit_processors", "logits_processor", "custom_logit_processor"),
        "use `logit_bias` or `allowed_token_ids`",
    ),
    "skip_special_tokens": "use `keep_special_tokens`",
    "spaces_between_special_tokens": "leave it out",
    "detokenize": "leave it out",
    "truncate_prompt_tokens": "cut the token ids of the prompt",
    **dict.fromkeys(("top_logprobs", "n_probs"), "use `logprobs`"),
    "sampling_seed": "use `seed`",
    "guided_json": "use `structured=StructuredOutput(json_schema=...)`",
    "json_schema": "use `structured=StructuredOutput(json_schema=...)`",
    "guided_json_object": "use `structured=StructuredOutput(json_object=True)`",
    "guided_regex": "use `structured=StructuredOutput(regex=...)`",
    "regex": "use `structured=StructuredOutput(regex=...)`",
    "guided_choice": "use `structured=StructuredOutput(choice=[...])`",
    "guided_grammar": "use `structured=StructuredOutput(grammar=...)`",
    "grammar": "use `structured=StructuredOutput(grammar=...)`",
    "ebnf": "use `structured=StructuredOutput(grammar=...)`",
    **dict.fromkeys(
        ("guided_decoding", "structured_outputs", "response_format", "structural_tag"),
        "use `structured=StructuredOutput(...)`",
    ),
    "use_cache": "K/V is always kept; leave it out",
    "stream": "`LLM.stream` and `AsyncLLM.stream` stream",
    "tools": "give them to `LLM.chat`",
}

# Arguments of `generate` and `chat`.
CALL_NAMES: Mapping[str, str] = {
    "sampling_params": "use `params`",
    "generation_config": "use `params`",
    "use_tqdm": "use `progress`",
    "lora_request": _LORA,
    "chat_template": _TEMPLATE,
    "chat_template_kwargs": "give its entries as arguments",
    "multi_modal_data": _MEDIA,
}

# Letters of llama.cpp's and others' command lines.
SHORT_FLAGS: Mapping[str, str] = {
    "m": _MODEL_ARGUMENT,
    "c": _CONTEXT,
    "n": "use `max_tokens`",
    "p": "use `prompt`",
    "f": "use `prompt_file`",
    "b": "use `max_batch_tokens`",
    "ub": "use `max_batch_tokens`",
    "np": "use `max_num_seqs`",
    "t": _THREADS,
    "tb": _THREADS,
    "ngl": _CPU,
    "fa": "use `attention_backend`; the default is right on CPU",
    "ctk": "use `kv_dtype`",
    "ctv": "use `kv_dtype`",
    "md": _DRAFT_MODEL,
    "hf": _MODEL_ARGUMENT,
    "tp": _ONE_PROCESS,
    "dp": _ONE_PROCESS,
    "pp": _ONE_PROCESS,
}


def python_advice(text: str) -> str:
    """A sentence of a table as an error of Python's API shows it."""
    return text.replace("`", "")


def field_advice(text: str) -> str:
    """A sentence of a table as an error about a field of an HTTP request shows it."""
    return python_advice(text).replace("use ", "send ", 1)


def flag_advice(text: str) -> str:
    """A sentence of a table as the command line shows it: flags in place of names."""

    def flag(match: re.Match[str]) -> str:
        name, value = match["name"].replace("_", "-"), match["value"]
        if value is None:
            return f"--{name}"
        return f"--no-{name}" if value == "False" else f"--{name} {value}"

    return re.sub(r"`(?P<name>\w+)(?:=(?P<value>\w+))?`", flag, text)
