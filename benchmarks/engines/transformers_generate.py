"""Hugging Face transformers: `generate` on static batches, SDPA attention, no cache between calls."""

from __future__ import annotations

import time

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria
from transformers.utils import logging as transformers_logging

from engines.contract import Answer, Prompts, Setup

BATCH_BYTES = 2 << 30  # of K/V in one static batch; more requests become several batches


class Transformers:
    """transformers' `generate`, as called in three lines of Python."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self.version = transformers.__version__
        self.note = ""
        self._token_bytes = setup.token_bytes
        self._batch = 1
        self.model = AutoModelForCausalLM.from_pretrained(
            setup.checkpoint, dtype=getattr(torch, setup.dtype)
        ).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def prepare(self, num_requests: int, request_tokens: int) -> None:
        """Choose the batch size: equal batches, as large as BATCH_BYTES allows."""
        most = max(1, BATCH_BYTES // (request_tokens * self._token_bytes))
        self._batch = -(-num_requests // -(-num_requests // most))

    @torch.inference_mode()
    def generate(self, prompts: Prompts, num_new: int) -> Answer:
        tokens: list[list[int]] = []
        first: list[float] = []
        last: list[float] = []
        start = time.perf_counter()

        class Clock(StoppingCriteria):  # type: ignore[misc]
            def __init__(self) -> None:
                self.times: list[float] = []

            def __call__(self, ids: torch.Tensor, scores: object, **named: object) -> torch.Tensor:
                self.times.append(time.perf_counter() - start)
                return torch.zeros(len(ids), dtype=torch.bool)

        for begin in range(0, len(prompts), self._batch):
            ids = torch.tensor(prompts[begin : begin + self._batch])
            clock = Clock()
            output_ids = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new,
                do_sample=False,
                stopping_criteria=[clock],
            )
            tokens += output_ids[:, ids.shape[1] :].tolist()
            first += [clock.times[0]] * len(ids)
            last += [clock.times[-1]] * len(ids)
        return Answer(tokens, first, last)

    def close(self) -> None:
        """Nothing to do."""


load = Transformers
