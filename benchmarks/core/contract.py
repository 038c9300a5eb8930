"""What every cache core is driven through, ours and the peers' alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class Core(Protocol):
    """A prefix cache with its page pool, driven one request at a time.

    The clock runs around `match`, `alloc` and `insert`, never around `prepare`: whoever serves
    tokens may keep them in the container that its cache wants.
    """

    def prepare(self, prompt: Tokens, output: Tokens) -> Any:
        """A request in the core's own containers; what the other calls take."""

    def match(self, request: Any) -> int:
        """Look up all but the last prompt token, pin the hit, obtain its page ids; tokens hit."""

    def alloc(self, request: Any) -> None:
        """Hand out pages for the rest of prompt and output; evict if there are too few."""

    def insert(self, request: Any) -> None:
        """Publish prompt and output, give back duplicates and the tail page, unpin."""

    def read_pages(self, request: Any) -> list[int]:
        """After `match`: the pages of the hit, in order."""

    def path_pages(self, request: Any) -> list[int]:
        """After `insert`: the whole pages of prompt and output as this request wrote or read them.

        A page that `insert` gave back as a duplicate is still named.
        """

    def evict(self, num_pages: int) -> None:
        """Evict at least `num_pages` pages."""

    def check(self) -> None:
        """Raise if pages leaked or pins were left behind; no request is open."""


Make = Callable[[int, int], Core]  # num_pages, page_size


@dataclass(frozen=True, slots=True)
class Loaded:
    """A core that can be measured here."""

    make: Make
    version: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the tables; `load` imports what it needs and raises `AbsentError` otherwise."""

    name: str
    title: str
    load: Callable[[Path], Loaded]  # gets the folder of the peers
    first: str = ""  # a folder in there that comes before all others on the import path


class AbsentError(Exception):
    """This core cannot be measured here; the message says why and what would change that."""


def round_up(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)
