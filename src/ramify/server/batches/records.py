"""What the directory of batches remembers: uploaded files, batches, and their states."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Purpose = Literal["batch", "batch_output"]
Api = Literal["openai", "anthropic"]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
UNFINISHED = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
WINDOW_S = 24 * 3600  # from the creation of a batch to its end
FILE_S = 30 * 24 * 3600  # after which files and ended batches are removed
# How the names of files in a tenant's folder begin.
RECORD_NAME = re.compile(r"(file|batch|msgbatch)[-_][0-9a-f]{32}")


class StoredFile(msgspec.Struct, frozen=True):
    """A file that a tenant can see: an uploaded input, or the results of a batch."""

    id: str
    tenant: str
    filename: str
    purpose: Purpose
    num_bytes: int
    created_at: int  # Unix seconds, as all times here
    expires_at: int


class LineError(msgspec.Struct, frozen=True):
    """A fault of an input file, in OpenAI's form."""

    code: str
    message: str
    line: int | None = None  # from 1
    param: str | None = None


class LineCounts(msgspec.Struct, frozen=True):
    """Lines of a batch by result; those without one have still to be answered."""

    total: int = 0
    succeeded: int = 0
    errored: int = 0
    cancelled: int = 0
    expired: int = 0

    @property
    def processing(self) -> int:
        """Lines without a result."""
        return self.total - self.succeeded - self.errored - self.cancelled - self.expired

    def add(self, result: Result) -> LineCounts:
        """The counts with one more result."""
        return msgspec.structs.replace(self, **{result: getattr(self, result) + 1})


Result = Literal["succeeded", "errored", "cancelled", "expired"]


class BatchRecord(msgspec.Struct, frozen=True):
    """A batch: what it has to answer, and how far it is.

    `output_id` and `error_id` are chosen when it is made, so that results can be written below these
    names before there are any files of them. `counts` are those of the last change of the state: while
    a batch runs, the runner knows better.
    """

    id: str
    tenant: str
    api: Api
    input_id: str  # a file, or the name of the requests that came with the batch
    endpoint: str
    output_id: str
    error_id: str
    created_at: int
    expires_at: int
    output_s: int = FILE_S  # from their making to the removal of the results
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    model: str | None = None
    errors: tuple[LineError, ...] = ()
    counts: LineCounts = LineCounts()
    times: dict[str, int] = {}  # state → when it was reached
    has_output: bool = False  # files of results, once it has ended
    has_errors: bool = False

    @property
    def is_unfinished(self) -> bool:
        """Whether lines may still be answered."""
        return self.status in UNFINISHED

    @property
    def ended_at(self) -> int | None:
        """When it ended; None: it has not."""
        return None if self.is_unfinished else self.times.get(self.status)
