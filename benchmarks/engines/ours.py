"""Ramify."""

from __future__ import annotations

import time
from typing import Any

import torch

import ramify
from engines.contract import AbsentError, Answer, Prompts, Resources, Setup
from engines.llama_file import quantized_path
from engines.plant import slowed
from engines.process import age_s, peak_memory
from ramify import LLM, SamplingParams
from ramify.errors import ConfigError, ModelError, UnknownOptionError


class Ramify:
    """`LLM.generate` in exact mode; the entry's options go to `LLM`."""

    note = ""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self.version = ramify.__version__
        options = dict(setup.options)
        plant = float(options.pop("plant", 1.0))
        watch = bool(options.pop("stopwatch", False))
        file_type = options.pop("file_type", None)
        model = quantized_path(setup, file_type) if file_type else setup.checkpoint
        try:
            self.llm = LLM(
                model,
                dtype=setup.dtype,
                exact=True,
                max_model_len=setup.max_len,
                kv_cache_tokens=setup.kv_tokens,
                **options,
            )
        except UnknownOptionError as error:
            raise AbsentError(f"not available: this version has no {error.name}") from error
        except (ConfigError, ModelError) as error:
            raise AbsentError(str(error)) from error
        self._load_s = age_s()
        if plant != 1.0:
            core: Any = self.llm.core
            core.step = slowed(core.step, plant)
        self._watch = None
        if watch:
            from engines.stopwatch import Stopwatch

            self._watch = Stopwatch.of_engine(self.llm.core)

    def prepare(self, num_requests: int, request_tokens: int) -> None:
        """Nothing to do."""

    def generate(self, prompts: Prompts, num_new: int) -> Answer:
        params = SamplingParams(max_tokens=num_new, ignore_eos=True)
        if self._watch is not None:
            self._watch.reset()
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        total = time.perf_counter() - start
        for output in outputs:
            if output.error is not None:
                raise output.error
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        computed = sum(output.cache.computed_tokens for output in outputs)
        facts: dict[str, float] = {"prompt_tokens": prompt, "computed_tokens": computed}
        if self._watch is not None:
            facts |= {f"{name}_s": spent for name, spent in self._watch.spent(total).items()}
            facts["steps"] = self._watch.num_steps
        return Answer(
            [list(output.token_ids) for output in outputs],
            [output.metrics.ttft_s or 0.0 for output in outputs],
            [output.metrics.total_s for output in outputs],
            facts,
        )

    def resources(self) -> Resources:
        sizes = {name: weight.num_bytes for name, weight in self.llm.engine.decoder.loaded.items()}
        if "lm_head.weight" in sizes:
            del sizes["model.embed_tokens.weight"]
        return Resources(self._load_s, peak_memory(), sum(sizes.values()))

    def close(self) -> None:
        """Nothing to do."""


load = Ramify
