"""vLLM's own types and its subscriber's protocol: KV events of a running server, decoded and replayed."""

from __future__ import annotations

import json
import os
import time
import urllib.request

import zmq
from msgspec.msgpack import Decoder
from report import MODEL, URL, case
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

decoder = Decoder(KVEventBatch)
context = zmq.Context()
live = context.socket(zmq.SUB)
live.connect(os.environ["RAMIFY_KV_EVENTS"])
live.setsockopt_string(zmq.SUBSCRIBE, "")
PROMPT = "The old bridge of Rome stands near the market, and Marcus sells lamps there. " * 4
END = (1 << 64) - 1
WAIT_S = 10.0


def call(method: str, path: str, body: object = None) -> dict:
    request = urllib.request.Request(
        URL + path,
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def complete(prompt: str) -> None:
    call("POST", "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 2})


def batches(until: type) -> list[KVEventBatch]:
    """Live batches, up to the first with an event of a kind."""
    deadline, received = time.monotonic() + WAIT_S, []
    while time.monotonic() < deadline:
        if live.poll(100):
            _, sequence, payload = live.recv_multipart()
            assert len(sequence) == 8
            received.append(decoder.decode(payload))
            if any(isinstance(event, until) for event in received[-1].events):
                return received
    raise AssertionError(f"no {until.__name__} within {WAIT_S} s")


def replayed(first: int) -> list[KVEventBatch]:
    asking = context.socket(zmq.DEALER)
    asking.connect(os.environ["RAMIFY_KV_REPLAY"])
    asking.send_multipart([b"", first.to_bytes(8, "big")])
    received = []
    while asking.poll(1000 * WAIT_S):
        _, _, sequence, payload = asking.recv_multipart()
        if int.from_bytes(sequence, "big") == END:
            asking.close()
            return received
        received.append(decoder.decode(payload))
    raise AssertionError("the replay has no end")


def blocks(received: list[KVEventBatch]) -> set:
    names: set = set()
    for batch in received:
        for event in batch.events:
            if isinstance(event, BlockStored):
                names.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                names.difference_update(event.block_hashes)
            else:
                names.clear()
    return names


@case("vLLM's types decode what is stored: hashes, parents, tokens")
def _() -> str:
    # Until the subscription has arrived, batches pass it by.
    for number in range(50):
        complete(f"{number} {PROMPT}")
        if live.poll(100):
            break
    stored = [
        event
        for batch in batches(BlockStored)
        for event in batch.events
        if isinstance(event, BlockStored)
    ]
    assert stored
    for event in stored:
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        assert event.medium == "GPU"
        assert event.lora_name is None
    return f"{sum(len(event.block_hashes) for event in stored)} blocks"


@case("a replay from 0 has the blocks of the whole cache")
def _() -> str:
    time.sleep(0.5)  # for the last batch to be published
    names, pages = blocks(replayed(0)), call("GET", "/v1/cache")["cached_pages"]
    assert len(names) == pages, (len(names), pages)
    return f"{pages} pages"


@case("a clear removes them")
def _() -> str:
    call("DELETE", "/v1/cache")
    deadline = time.monotonic() + WAIT_S
    while blocks(replayed(0)):
        assert time.monotonic() < deadline, "blocks are left"
        time.sleep(0.1)
    kinds = {type(event) for batch in replayed(0) for event in batch.events}
    assert kinds <= {BlockStored, BlockRemoved, AllBlocksCleared}
    return ", ".join(sorted(kind.__name__ for kind in kinds))
