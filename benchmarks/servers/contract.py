"""What a server is started with, and what a cell measures. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean, median
from typing import Any

MODEL = "smollm2"  # by this name every server serves it


class Kind(StrEnum):
    """Whose server it is."""

    RAMIFY = "ramify"
    VLLM = "vllm"
    LLAMA = "llama"


@dataclass(frozen=True, slots=True)
class ServerEntry:
    """A row of the tables."""

    name: str
    title: str
    kind: Kind
    weights: str  # bf16 or q4: servers with the same are compared
    engine: str = ""  # of engines.registry: the same engine and weights without a server


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The same model in every form that a server reads."""

    checkpoint: Path  # Hugging Face, bfloat16, with tokenizer and chat template
    bf16_file: Path  # GGUF
    q4_file: Path  # GGUF, as it was published


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started; what `environment` sets comes on top of this process's."""

    command: tuple[str, ...]
    environment: Mapping[str, str]

    def shown(self, hidden: Mapping[str, str]) -> str:
        """The command with its variables, for a reader; `hidden`: texts and what stands for them."""
        parts = [f"{name}={value}" for name, value in self.environment.items()]
        text = " ".join([*parts, *self.command])
        for value, stand_in in hidden.items():
            text = text.replace(value, stand_in)
        return text


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One request as its client saw it; seconds since it was sent."""

    ttft_s: float
    total_s: float
    prompt_tokens: int
    output_tokens: int

    @property
    def token_s(self) -> float:
        """Seconds for each token after the first."""
        return (self.total_s - self.ttft_s) / max(1, self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """A cell as its client saw it."""

    duration_s: float
    completed: int
    prompt_tokens: int
    output_tokens: int
    ttft_median_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    token_median_s: float  # of the requests' means
    token_mean_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all requests over the time of all."""
        return self.output_tokens / self.duration_s

    @classmethod
    def of_requests(cls, duration_s: float, requests: Sequence[RequestTimes]) -> ClientFigures:
        """From every request; the percentile is the nearest rank."""
        first = sorted(request.ttft_s for request in requests)
        between = [request.token_s for request in requests]
        return cls(
            duration_s=duration_s,
            completed=len(requests),
            prompt_tokens=sum(request.prompt_tokens for request in requests),
            output_tokens=sum(request.output_tokens for request in requests),
            ttft_median_s=median(first),
            ttft_p99_s=first[-(-99 * len(first) // 100) - 1],
            ttft_mean_s=fmean(first),
            token_median_s=median(between),
            token_mean_s=fmean(between),
        )

    @classmethod
    def of_vllm_bench(cls, result: Mapping[str, Any], num_new: int) -> ClientFigures:
        """From what `vllm bench serve` returns, in milliseconds, for answers of `num_new` tokens.

        The tokens of an answer are not those that it counts: it does not read the usage of llama.cpp,
        which comes with the last text, and then tokenises the text, into a token less now and then.
        """
        between = [sum(gaps) / max(1, num_new - 1) for gaps in result["itls"]]
        return cls(
            duration_s=result["duration"],
            completed=result["completed"],
            prompt_tokens=result["total_input_tokens"],
            output_tokens=result["completed"] * num_new,
            ttft_median_s=result["median_ttft_ms"] / 1e3,
            ttft_p99_s=result["p99_ttft_ms"] / 1e3,
            ttft_mean_s=result["mean_ttft_ms"] / 1e3,
            token_median_s=median(between),
            token_mean_s=fmean(between),
        )


@dataclass(frozen=True, slots=True)
class OwnFigures:
    """The same cell as the server counts it; None where it does not."""

    ttft_mean_s: float | None
    token_mean_s: float | None
    output_tokens: float
    hit_rate: float | None  # share of prompt tokens that were not computed


@dataclass(frozen=True, slots=True)
class Offline:
    """All requests of a cell, handed to the engine at once."""

    total_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One cell on one server, once."""

    client: ClientFigures
    own: OwnFigures
    server_cpu_s: float
    idle_cpu_s: float  # of all other servers in that time
    offline: Offline | None = None  # the same requests by the engine without a server
    bound_s: float | None = None  # what their arithmetic and bytes take on this machine, if known
