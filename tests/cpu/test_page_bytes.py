"""A page as bytes: all planes of all layers, bit for bit, and no other page."""

import sys
import time
from collections.abc import Iterator
from threading import Thread

import pytest
import torch

from ramify.errors import ConfigError
from ramify.kv.layout import KVLayout
from ramify.kv.page_bytes import PageBytes
from ramify.kv.pool import KVPool

LAYOUTS = {
    "mha": KVLayout.mha(2, 3, 8, 16),
    "mla": KVLayout.mla(3, 12, 4).with_index_key(6),
    "vectorised": KVLayout.mha(2, 2, 16).vectorised(),
}
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=[*LAYOUTS])
def test_a_page_goes_out_and_comes_back_elsewhere(layout: KVLayout, dtype: torch.dtype) -> None:
    """Page 1 copied out and in as page 3 is page 1 in every plane; the others stay."""
    pool = KVPool(layout, 5, 16, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    planes = [plane for layer in range(layout.num_layers) for plane in pool.planes(layer).values()]
    for plane in planes:
        flat = plane.view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, generator=generator, dtype=torch.uint8))
    before = [plane.view(torch.uint8).clone() for plane in planes]
    device = PageBytes(pool)
    buffer = memoryview(bytearray(device.page_bytes))

    device.read_page(1, buffer)
    device.write_page(3, buffer)

    assert device.page_bytes == layout.token_bytes(dtype) * 16
    for plane, old in zip(planes, before, strict=True):
        new = plane.view(torch.uint8)
        assert torch.equal(new[3], old[1])
        assert torch.equal(new[[0, 1, 2, 4, 5]], old[[0, 1, 2, 4, 5]])


@pytest.mark.parametrize("page", [-1, 5])
def test_the_padding_page_is_no_page_of_a_tier(page: int) -> None:
    """Nor is a page that the pool does not have."""
    device = PageBytes(KVPool(LAYOUTS["mha"], 5, 4))
    buffer = memoryview(bytearray(device.page_bytes))

    with pytest.raises(ConfigError, match=f"page {page} is not in 0..4"):
        device.read_page(page, buffer)
    with pytest.raises(ConfigError, match=f"page {page} is not in 0..4"):
        device.write_page(page, buffer)


def test_a_buffer_of_another_size_is_refused() -> None:
    """A copy would go beyond its end; and a read-only one is not written to."""
    device = PageBytes(KVPool(LAYOUTS["mha"], 5, 4))
    short = memoryview(bytearray(device.page_bytes - 1))

    for copy in (device.read_page, device.write_page):
        with pytest.raises(ConfigError, match=f"{device.page_bytes - 1} bytes for a page of"):
            copy(1, short)
    with pytest.raises(ConfigError, match="read-only"):
        device.read_page(1, memoryview(bytes(device.page_bytes)))


@pytest.fixture
def _no_forced_switches() -> Iterator[None]:
    """A thread that holds the interpreter's lock keeps it until it gives it up."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_no_forced_switches")
def test_a_copy_hands_the_interpreter_to_no_other_thread() -> None:
    """The engine's thread would wait until it gets the lock back, at each piece of a page."""
    device = PageBytes(KVPool(KVLayout.mha(1, 1, 64), 1, 1 << 16))  # pieces of 16 MB
    buffer = memoryview(bytearray(device.page_bytes))
    times: list[float] = []

    def run() -> None:
        time.sleep(0.001)
        times.append(time.perf_counter())

    for copy in (device.read_page, device.write_page):
        begin_s = end_s = 0.0
        while (
            not times or times[-1] < begin_s
        ):  # on a busy machine it may run before the copy begins
            thread = Thread(target=run)
            thread.start()
            begin_s = time.perf_counter()
            copy(0, buffer)
            end_s = time.perf_counter()
            thread.join()
        assert times[-1] >= end_s
        times.clear()
