"""OpenVINO GenAI: continuous batching, prefix caching on, driven step by step with token ids."""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np

from engines.contract import Answer, Prompts, Resources, Setup
from engines.openvino_graph import write_graph
from engines.process import age_s, peak_memory

HINTS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVino:
    """`ContinuousBatchingPipeline` with the precision of the checkpoint.

    With integer weights (option `bits`), precision is what OpenVINO chooses: activations in int8 by
    groups, K/V in int8.
    """

    def __init__(self, setup: Setup) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        self.version = self._genai.__version__
        bits = int(setup.options.get("bits", 0))
        folder = write_graph(setup, bits)
        core = self._openvino.Core()
        abilities = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        hint, self.note, cache_bytes = HINTS[setup.dtype], "", 2 * setup.kv_bytes
        if bits:
            self.note = "activations and K/V in the precision that it chooses"
        elif hint == "bf16" and "BF16" not in abilities:
            # Asked for bfloat16, it would give up on its own cache: attention there wants float32.
            hint, cache_bytes = "f32", 2 * cache_bytes
            self.note = "computes and caches in float32: it sees no bfloat16 instructions here"
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = max(1, -(-cache_bytes // 2**30))
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        scheduler.dynamic_split_fuse = True
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": setup.threads,
            "ENABLE_CPU_PINNING": False,
        }
        if not bits:
            properties |= {"INFERENCE_PRECISION_HINT": hint, "KV_CACHE_PRECISION": hint}
        self._pipe = self._genai.ContinuousBatchingPipeline(
            str(folder), scheduler, "CPU", properties
        )
        self._load_s = age_s()
        self._token_bytes = int((folder / "complete").read_text("ascii") or 0)
        self._count = 0

    def prepare(self, num_requests: int, request_tokens: int) -> None:
        """Nothing to do."""

    def generate(self, prompts: Prompts, num_new: int) -> Answer:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = num_new
        config.ignore_eos = True
        config.do_sample = False
        tokens: list[list[int]] = [[] for _ in prompts]
        first, last = [0.0] * len(prompts), [0.0] * len(prompts)
        start = time.perf_counter()
        handles = []
        for prompt in prompts:
            ids = self._openvino.Tensor(np.array([prompt], np.int64))
            handles.append(self._pipe.add_request(self._count, ids, config))
            self._count += 1
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            now = time.perf_counter() - start
            for row, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[row] += output.generated_ids
                        first[row] = first[row] or now
                        last[row] = now
        return Answer(tokens, first, last)

    def resources(self) -> Resources:
        return Resources(self._load_s, peak_memory(), self._token_bytes)

    def close(self) -> None:
        """Nothing to do."""


load = OpenVino
