"""Model families beside transformers and a peer, and beside a dense Llama of the same size.

    make bench-families                                            all families in bfloat16
    make bench-families ARGS="--families gemma3,qwen3-moe --rounds 9 --engines ramify"

Each family is a random checkpoint of 0.35 to 0.4 B parameters, written by transformers. Cells: prefill
of one prompt of 512 tokens, decode of 1 and of 8 requests after 128 tokens, once all their prompts are
computed. The engines of a family and Ramify on the Llama take turns within a round, on new prompts.

`x roofline` is the time over the least possible one: arithmetic at the measured matmul peak, or weights
and K/V at the read bandwidth, whichever takes longer; the median over the rounds. The bandwidth of a
machine with neighbours changes by half within minutes, so each round measures it before and after each
cell and takes the larger. Of experts, prefill reads all, and a
decode step those that requests hit where each hits its experts at random. `/ Llama` is Ramify's
distance from the roofline over that of the Llama in the same round: median, least, greatest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from arguments import count, names
from engines.contract import Entry, Setup
from engines.json_process import ProcessGoneError, TooSlowError
from engines.models import DTYPES, MODELS, VALUE_BYTES
from engines.peaks import Peaks
from engines.registry import ENTRIES, OURS
from engines.report import setting
from engines.roofline import Machine
from engines.run import LOAD_LIMIT_S, Worker
from engines.stats import Spread, paired_ratios
from engines.workloads import Task

ROOT = Path(__file__).parents[1]
LIMIT_S = 120.0
BASE = "llama"
Config = Mapping[str, Any]
# Class of the configuration in transformers, and its fields.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    BASE: ("LlamaConfig", MODELS["M"]),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "hidden_size": 1024, "num_hidden_layers": 20, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 4096,
            "vocab_size": 65536, "max_position_embeddings": 8192, "sliding_window": 512,
            "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
        },
    ),
    "phi": (
        "Phi3Config",
        {
            "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
            "num_key_value_heads": 8, "intermediate_size": 2816, "vocab_size": 65536,
            "max_position_embeddings": 8192, "original_max_position_embeddings": 8192,
            "partial_rotary_factor": 0.75, "tie_word_embeddings": True, "sliding_window": None,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
            "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 8,
            "moe_intermediate_size": 256, "intermediate_size": 256, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 32000,
            "max_position_embeddings": 8192, "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
CHOSEN = (OURS, "transformers", "vllm")


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured: requests at once, tokens of a prompt, new tokens; one is a prefill."""

    batch: int
    prompt: int
    num_new: int

    @property
    def name(self) -> str:
        """The cell's name in the table."""
        if self.num_new == 1:
            return f"prefill {self.prompt}"
        return f"decode {self.batch} after {self.prompt}"

    @property
    def tokens(self) -> int:
        """Tokens per figure: of the prompt, or of a step."""
        return self.prompt if self.num_new == 1 else self.batch

    def task(self, round_number: int, vocab: int) -> Task:
        """Random prompts, the same for all engines in a round and new in the next."""
        rng = random.Random(f"{self.name} {round_number}")
        prompts = [[rng.randrange(3, vocab) for _ in range(self.prompt)] for _ in range(self.batch)]
        return Task([], [prompts], self.num_new)

    def seconds(self, reply: Mapping[str, Any]) -> float:
        """Of the prompt, or of a decode step: between two tokens of the request that starts last."""
        return float(reply["total_s" if self.num_new == 1 else "decode_s"])


CELLS = (Cell(1, 512, 1), Cell(1, 128, 33), Cell(8, 128, 33))


@dataclass(frozen=True, slots=True)
class Cost:
    """Weights and K/V of a family, in numbers."""

    layer: int  # of a layer, but for its experts
    head: int
    expert: int  # of one expert; 0: a dense MLP, which is in `layer`
    num_experts: int
    top_k: int
    num_layers: int
    attention_width: int
    kv_values: int  # of a token, all layers

    @classmethod
    def of(cls, config: Config) -> Cost:
        """From the fields of a configuration."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        kv_width = config["num_key_value_heads"] * head_dim
        attention = hidden * (2 * heads * head_dim + 2 * kv_width)
        num_experts = config.get("num_experts", 0)
        mlp = 3 * hidden * config["moe_intermediate_size" if num_experts else "intermediate_size"]
        return cls(
            layer=attention + (hidden * num_experts if num_experts else mlp),
            head=hidden * config["vocab_size"],
            expert=mlp if num_experts else 0,
            num_experts=num_experts,
            top_k=config.get("num_experts_per_tok", 0),
            num_layers=config["num_hidden_layers"],
            attention_width=heads * head_dim,
            kv_values=2 * config["num_hidden_layers"] * kv_width,
        )

    @property
    def params(self) -> int:
        """Weights that a step can touch."""
        return self.num_layers * (self.layer + self.num_experts * self.expert) + self.head

    def experts_hit(self, num_tokens: int) -> float:
        """Expected number of experts of a layer that some token hits, each at random."""
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)

    def seconds(self, cell: Cell, machine: Machine) -> float:
        """The roofline of a figure of this cell."""
        is_prefill = cell.num_new == 1
        num_tokens = cell.tokens
        mean_length = cell.prompt / 2 if is_prefill else cell.prompt + cell.num_new / 2
        rows = 1 if is_prefill else num_tokens  # of the head
        macs = num_tokens * self.num_layers * (
            self.layer + self.top_k * self.expert + 2 * self.attention_width * mean_length
        ) + rows * self.head  # fmt: skip
        weights = self.num_layers * (self.layer + self.experts_hit(num_tokens) * self.expert)
        kv_tokens = num_tokens if is_prefill else cell.batch * mean_length
        values = weights + self.head + kv_tokens * self.kv_values
        return max(2.0 * macs / machine.peak, values * machine.value_bytes / machine.bandwidth)


def write_family(root: Path, family: str, dtype: str) -> Path:
    """The folder of a family with its checkpoint in this dtype, written by transformers if absent."""
    folder = root / f"family-{family}"
    path = folder / dtype
    class_name, fields = FAMILIES[family]
    stamp = json.dumps([class_name, fields])
    complete = path / "complete"
    if complete.is_file() and complete.read_text("utf-8") == stamp:
        return folder
    import torch
    import transformers

    shutil.rmtree(path, ignore_errors=True)
    torch.manual_seed(0)
    config = getattr(transformers, class_name)(
        **fields, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(path)
    complete.write_text(stamp, "utf-8")
    return folder


class Side:
    """An engine on one family: its process, and seconds by cell and round."""

    def __init__(self, family: str, entry: Entry, args: argparse.Namespace) -> None:
        self.family, self.entry, self.absent = family, entry, ""
        self.vocab: int = FAMILIES[family][1]["vocab_size"]
        self.seconds: dict[str, list[float]] = {cell.name: [] for cell in CELLS}
        self.worker: Worker | None = None
        python = args.peers / entry.environment / "bin" / "python"
        if entry.environment and not python.exists():
            self.absent = f"{entry.environment} is not installed: make bench-engine"
            return
        longest = max(cell.prompt + cell.num_new for cell in CELLS)
        setup = Setup(
            write_family(args.scratch, family, args.dtype), args.dtype, args.threads, longest + 64, 16 * longest,
            Cost.of(FAMILIES[family][1]).kv_values * VALUE_BYTES[args.dtype],
        )  # fmt: skip
        self.worker = Worker(entry, args.peers, args.threads)
        given = asdict(setup) | {"folder": str(setup.folder)}
        reply = self._ask(LOAD_LIMIT_S, setup=given)
        if "absent" in reply:
            self._end(str(reply["absent"]))

    def measure(self, cell: Cell, round_number: int) -> None:
        """Add a figure of the cell; round -1 warms up and adds none."""
        if self.worker is None:
            return
        reply = self._ask(LIMIT_S, task=asdict(cell.task(round_number, self.vocab)))
        if round_number >= 0 and "total_s" in reply:
            self.seconds[cell.name].append(cell.seconds(reply))

    def end(self) -> None:
        """End the process."""
        if self.worker is not None:
            self.worker.end()
            self.worker = None

    def _ask(self, limit_s: float, **command: Any) -> dict[str, Any]:
        assert self.worker is not None
        try:
            return self.worker.ask(limit_s, **command)
        except (ProcessGoneError, TooSlowError) as gone:
            self._end(str(gone))
            return {}

    def _end(self, reason: str) -> None:
        self.absent = reason
        self.end()


def measure_family(
    family: str, base: Side, args: argparse.Namespace, peaks: Peaks
) -> tuple[list[Side], int, dict[str, list[float]]]:
    """Measure all engines on a family in turns with `base`.

    Returns:
        The engines, where the family's rounds begin in those of `base`, and bytes/s by cell and round.
    """
    rates: dict[str, list[float]] = {cell.name: [] for cell in CELLS}
    before = len(base.seconds[CELLS[0].name])
    sides = [
        base if (family, name) == (BASE, OURS) else Side(family, ENTRIES[name], args)
        for name in args.engines
    ]
    turns = sides if base in sides else [base, *sides]
    for round_number in range(-1, args.rounds):
        peaks.sample(args.dtype)
        for cell in CELLS:
            rate = peaks.read()
            for side in turns if round_number % 2 == 0 else turns[::-1]:
                side.measure(cell, round_number if round_number < 0 else before + round_number)
            if round_number >= 0:
                rates[cell.name].append(max(rate, peaks.read()))
        print(f"  {family}: round {round_number + 1} of {args.rounds}", file=sys.stderr)
    for side in sides:
        if side is not base:
            side.end()
    return sides, before, rates


def table(
    family: str,
    sides: Sequence[Side],
    base: Side,
    first_round: int,
    machine: Machine,
    rates: Mapping[str, Sequence[float]],
) -> str:
    """The rows of a family: tokens/s and distance from the roofline by engine and cell."""
    lines = []
    cost, base_cost = Cost.of(FAMILIES[family][1]), Cost.of(FAMILIES[BASE][1])
    for cell in CELLS:
        machines = [replace(machine, bandwidth=rate) for rate in rates[cell.name]]
        rounds, rooflines = len(machines), [cost.seconds(cell, machine) for machine in machines]
        ours = next((side for side in sides if side.entry.name == OURS), None)
        for side in sides:
            times = side.seconds[cell.name]
            if side is base:
                times = times[first_round : first_round + rounds]
            title = f"| {family} {cost.params / 1e9:.2f} B | {cell.name} | {side.entry.title} "
            if not times:
                lines.append(f"{title}| {side.absent} | | | |")
                continue
            took = Spread.of(times)
            versus, llama = "", ""
            if ours is not None and side is not ours and ours.seconds[cell.name]:
                mine = ours.seconds[cell.name]
                mine = mine[first_round:] if ours is base else mine
                versus = _spread(paired_ratios(times, mine))
            if side is ours and family != BASE:
                base_times = base.seconds[cell.name][first_round : first_round + rounds]
                llama = _spread(
                    [
                        ratio * base_cost.seconds(cell, machine) / roofline
                        for ratio, machine, roofline in zip(
                            paired_ratios(times, base_times), machines, rooflines, strict=False
                        )
                    ]
                )
            distance = _spread(
                [taken / least for taken, least in zip(times, rooflines, strict=False)]
            )
            lines.append(
                f"{title}| {cell.tokens / took.mid:,.0f} ({cell.tokens / took.high:,.0f}–"
                f"{cell.tokens / took.low:,.0f}) | {distance} | {llama} | {versus} |"
            )
    return "\n".join(lines)


HEAD = (
    "| family | work | engine | tokens/s: median (min–max) | × roofline | / Llama | time / Ramify's |"
    "\n|---|---|---|---:|---:|---:|---:|"
)


def _spread(ratios: Sequence[float]) -> str:
    spread = Spread.of(ratios)
    return f"{spread.mid:.2f} ({spread.low:.2f}–{spread.high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--families", type=names(FAMILIES), default=list(FAMILIES), help="comma-separated"
    )
    parser.add_argument(
        "--engines", type=names(ENTRIES), default=list(CHOSEN), help="comma-separated"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rounds", type=count, default=5, help="of all engines in turns")
    parser.add_argument("--threads", type=count, default=os.cpu_count() or 1)
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers-engine")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "bench-models")
    args = parser.parse_args()
    for name, value in setting("bench-families", args.threads).items():
        print(f"{name}: {value}")
    peaks = Peaks(args.threads)
    base = Side(BASE, ENTRIES[OURS], args)
    if base.absent:
        raise SystemExit(f"{OURS} cannot be loaded: {base.absent}")
    measured = []
    try:
        for family in args.families:
            measured.append((family, *measure_family(family, base, args, peaks)))
    finally:
        base.end()
    machine = Machine(peaks.flops[args.dtype], peaks.bandwidth, VALUE_BYTES[args.dtype])
    read = Spread.of(
        [rate for *_, rates in measured for values in rates.values() for rate in values]
    )
    print(
        f"\nMeasured peak {machine.peak / 1e9:,.0f} GFLOP/s, read bandwidth {read.mid / 1e9:.1f} "
        f"({read.low / 1e9:.1f}–{read.high / 1e9:.1f}) GB/s; {args.dtype}, {args.rounds} rounds.\n\n{HEAD}"
    )
    for family, sides, first_round, rates in measured:
        print(table(family, sides, base, first_round, machine, rates))


if __name__ == "__main__":
    main()
