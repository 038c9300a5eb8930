"""How the tensors of one quantised linear layer are to be read. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Packing = Literal[
    "gptq",
    "awq",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "fp8",
    "bnb-4bit",
    "bnb-8bit",
    "mxfp4",
]


@dataclass(frozen=True, slots=True)
class Scheme:
    """The layout of one linear layer.

    Args:
        packing: which tensors there are, and how codes lie in them.
        bits: of a code.
        group_size: consecutive elements of a row that share a scale; -1: the whole row; 0: the matrix.
        symmetric: whether zero points are those of the middle of the range.
        zero_offset: what is added to a stored zero point.
        block: rows and columns that share a scale, of float-quantized and fp8.
        nested: whether scales are themselves quantised, of bnb-4bit.
    """

    packing: Packing
    bits: Literal[4, 8]
    group_size: int = -1
    symmetric: bool = True
    zero_offset: int = 0
    block: tuple[int, int] | None = None
    nested: bool = False

    def __str__(self) -> str:
        """For logs and reports: "gptq, 4 bits, groups of 128"."""
        groups = {0: "one scale", -1: "a scale for each row"}.get(
            self.group_size, f"groups of {self.group_size}"
        )
        if self.block is not None:
            groups = f"blocks of {self.block[0]} x {self.block[1]}"
        if self.packing == "bnb-4bit":
            groups = "nested scales" if self.nested else "blocks of a row-major matrix"
        return f"{self.packing}, {self.bits} bits, {groups}"
