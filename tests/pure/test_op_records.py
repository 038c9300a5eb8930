"""The records of fused ops: one table for kernels, callers and the page."""

import runpy
from pathlib import Path

from ramify.kernels.cpu import op_records
from ramify.kernels.cpu.op_records import OP_FIELDS, OP_KIND, OP_NUM_TASKS, RECORDS, NormOp, op_row

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "op_records.py"
NUMBERS = (
    op_records.GEMM,
    op_records.NORM_ROPE,
    op_records.NORM,
    op_records.ROUTE,
    op_records.GROUP,
    op_records.COMBINE,
)


def test_the_page_is_up_to_date() -> None:
    """`make options` changes nothing."""
    table = runpy.run_path(str(SCRIPT))

    assert table["PAGE"].read_text(encoding="utf-8") == table["page"](), "run `make options`"


def test_every_record_says_its_op_and_its_tasks_at_the_same_place() -> None:
    """A worker reads the op, and of all but a GEMM the number of tasks, before it knows the record."""
    assert [record()[OP_KIND] for record in RECORDS] == list(range(len(RECORDS)))
    for record in RECORDS[1:]:
        assert record._fields[OP_NUM_TASKS] == "num_tasks"


def test_the_number_of_a_field_is_its_place() -> None:
    """`op_row(record)[NUMBERS.field]` is the field's value."""
    for record, numbers in zip(RECORDS, NUMBERS, strict=True):
        assert isinstance(numbers, record)
        row = op_row(record(*range(100, 100 + len(numbers))))
        assert [row[number] for number in numbers] == list(row[: len(numbers)])


def test_a_row_has_zeros_behind_its_record() -> None:
    """A row has OP_FIELDS int64, whatever the record."""
    row = op_row(NormOp(width=7))

    assert len(row) == OP_FIELDS
    assert row[op_records.NORM.width] == 7
    assert not any(row[len(NormOp._fields) :])
