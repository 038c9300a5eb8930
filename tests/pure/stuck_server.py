"""A process that ends an engine whose step never ends, as a server at the end of its drain does."""

from __future__ import annotations

import asyncio
import logging
import sys

from ramify.params import SamplingParams
from ramify.server.operations.engine_end import end_engine
from tests.pure.cluster_bench import Member, prompts
from tests.pure.stuck_replica import Stuck


async def main() -> int:
    member = Member(options={"step_timeout_s": 0.2})
    gate = Stuck(member.bench.device)
    member.bench.core.executor = gate
    gate.num_left = 3
    stream = member.llm.stream(prompts(1)[0], SamplingParams(max_tokens=20, ignore_eos=True))
    await anext(stream)
    await end_engine(member.llm)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.exit(asyncio.run(main()))
