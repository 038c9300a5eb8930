"""Threads that tests hold up where they want them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LIMIT_S = 60.0  # a test that hangs fails with its stack


class Pause:
    """A place at which a thread waits until a test ends the pause."""

    def __init__(self) -> None:
        self._reached, self._ended = threading.Event(), threading.Event()

    def reach(self) -> bool:
        """Wait for `end`; returns False, for use as a predicate."""
        self._reached.set()
        assert self._ended.wait(LIMIT_S)
        return False

    def wait_until_reached(self) -> None:
        assert self._reached.wait(LIMIT_S)

    def end(self) -> None:
        self._ended.set()


@contextmanager
def joined(name: str, call: Callable[[], object]) -> Iterator[None]:
    """Run `call` in a thread during the block; at its end join it, and raise what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(LIMIT_S)
    assert not thread.is_alive(), f"thread {name} hangs"
    if errors:
        raise errors[0]
