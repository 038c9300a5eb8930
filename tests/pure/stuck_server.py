"""A process that ends an engine whose step never ends, as a server at the end of its drain does."""

from __future__ import annotations

import asyncio
import logging
import sys

from ramify.params import SamplingParams
from ramify.server.operations.engine_end import end_engine
from tests.pure.async_bench import LIMIT_S
from tests.pure.cluster_bench import Member, prompts
from tests.pure.stuck_replica import Stuck


async def main() -> int:
    member = Member(options={"step_timeout_s": 0.2})
    gate = Stuck(member.bench.device)
    member.bench.core.executor = gate
    gate.num_left = 3
    stream = member.llm.stream(prompts(1)[0], SamplingParams(max_tokens=20, ignore_eos=True))
    await anext(stream)
    # An engine whose present step ends computes no further one after `aclose`.
    if not await asyncio.to_thread(gate.is_stuck.wait, LIMIT_S):
        raise TimeoutError(f"no step was stuck within {LIMIT_S:.0f} s")
    await end_engine(member.llm)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.exit(asyncio.run(main()))
