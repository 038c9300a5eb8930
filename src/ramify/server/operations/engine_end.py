"""Ends an engine. A step that is stuck cannot be ended: the process ends, for another one to take its place."""

from __future__ import annotations

import asyncio
import logging
import os

from ramify.engine.serving.engine_thread import Health
from ramify.server.engine_client import EngineClient

logger = logging.getLogger(__name__)

CHECK_S = 1.0  # between looks at the engine
ENGINE_FAILED = 1  # exit code


def exit_if_stuck(health: Health) -> None:
    """End this process at once if a step takes longer than `step_timeout_s`."""
    if health.stuck_s is not None:
        logger.critical("a step takes %.0f s already: this process ends", health.stuck_s)
        logging.shutdown()
        os._exit(ENGINE_FAILED)


async def end_engine(engine: EngineClient) -> None:
    """End an engine after its present step; live requests are aborted."""
    ending = asyncio.ensure_future(engine.aclose())
    while not ending.done():
        exit_if_stuck(engine.health())
        await asyncio.wait((ending,), timeout=CHECK_S)
    ending.result()
