"""`BatchPlan`: where the lines of an input file are, and the order in which they run."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ramify.errors import RamifyError
from ramify.server.batches.lines import LineFaultError, LineForm, model_of
from ramify.server.batches.prefix_order import num_answers, prefix_key
from ramify.server.batches.records import LineError
from ramify.server.errors import ApiError
from ramify.server.http.request_body import without_mark
from ramify.server.http.wire import MAX_BODY_BYTES

MAX_LINES = 50_000
MAX_ERRORS = 100  # that a failed batch lists
MAX_LINE_BYTES = MAX_BODY_BYTES
MAX_ROWS = 0xFFFF


class InputLostError(RamifyError):
    """The input file of a batch has been removed from the directory by hand."""


@dataclass(slots=True)
class BatchPlan:
    """The requests of an input file by number, from 0; the file itself stays on disk.

    Made in one pass: a checksum key of each line is kept for the sort, no text.

    Args:
        path: the file.
        form: of its lines.
    """

    path: Path
    form: LineForm
    offsets: array[int] = field(default_factory=lambda: array("q"))
    lens: array[int] = field(default_factory=lambda: array("l"))
    rows: array[int] = field(default_factory=lambda: array("H"))  # of the engine's batch, at once
    order: list[int] = field(default_factory=list)  # numbers, as they run
    numbers: dict[str, int] = field(default_factory=dict)  # by custom id
    errors: list[LineError] = field(default_factory=list)
    model: str | None = None

    def __len__(self) -> int:
        return len(self.offsets)

    @classmethod
    def read_file(
        cls,
        path: Path,
        form: LineForm,
        check_model: Callable[[str | None], object],
        *,
        tools_first: bool = False,
    ) -> BatchPlan:
        """Read and check an input file. Takes seconds for the largest: for a thread.

        Args:
            check_model: raises ApiError for a model that is not served.
            tools_first: see `prefix_key`.

        Raises:
            InputLostError: the file is gone.
            OSError: it cannot be read.
        """
        plan, keys = cls(path, form), list[bytes]()
        with plan._open() as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    line = bytes(without_mark(line))
                if not line.strip():
                    continue
                try:
                    keys.append(plan._add(line, file.tell() - len(line), check_model, tools_first))
                except LineFaultError as error:
                    plan.errors.append(error.at(number))
                if len(plan.errors) >= MAX_ERRORS or len(line) > MAX_LINE_BYTES:
                    break
                if len(plan) > MAX_LINES:
                    message = f"The file has more than {MAX_LINES} lines; make several batches."
                    plan.errors.append(LineError("too_many_tasks", message))
                    break
        if not len(plan) and not plan.errors:
            plan.errors.append(LineError("empty_file", "The input file has no requests."))
        plan.order = sorted(range(len(keys)), key=keys.__getitem__)
        return plan

    def _add(
        self,
        line: bytes,
        offset: int,
        check_model: Callable[[str | None], object],
        tools_first: bool,
    ) -> bytes:
        """Append a line; returns its sort key.

        Raises:
            LineFaultError: it is not a request of this batch.
        """
        if len(line) > MAX_LINE_BYTES:
            message = f"This line has more than {MAX_LINE_BYTES} bytes."
            raise LineFaultError("invalid_json_line", message)
        request = self.form.read(line)
        if request.custom_id in self.numbers:
            raise LineFaultError(
                "duplicate_custom_id",
                "The custom_id for this request is a duplicate of another request. The custom_id "
                "parameter must be unique for each request in a batch.",
                "custom_id",
            )
        if self.form.has_single_model:
            self._check_model(model_of(request.body), check_model)
        self.numbers[request.custom_id] = len(self)
        self.offsets.append(offset)
        self.lens.append(len(line))
        self.rows.append(min(num_answers(request.body), MAX_ROWS))
        return prefix_key(request.body, tools_first=tools_first)

    def _check_model(self, model: str | None, check_model: Callable[[str | None], object]) -> None:
        if not len(self):
            self.model = model
            try:
                check_model(model)
            except ApiError as error:
                raise LineFaultError("model_not_found", error.message, "body.model") from None
        elif model != self.model:
            raise LineFaultError(
                "model_mismatch",
                f"The model {str(model)[:100]!r} is not that of the lines before, "
                f"{str(self.model)[:100]!r}. All lines of a batch must have the same model.",
                "body.model",
            )

    def read_line(self, number: int) -> bytes:
        """The bytes of a line.

        Raises:
            InputLostError: the file is gone.
            OSError: it cannot be read.
        """
        with self._open() as file:
            return os.pread(file.fileno(), self.lens[number], self.offsets[number])

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except FileNotFoundError:
            raise InputLostError(f"{self.path} is gone") from None
