"""Tensors of one linear layer by their suffixes: each there, of its shape and dtype, none more."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ramify.errors import CheckpointError
from ramify.models.configs.fields import shown


def check_suffixes(
    name: str,
    tensors: Mapping[str, Tensor],
    needed: Collection[str],
    optional: Collection[str] = (),
) -> None:
    """CheckpointError if a tensor of a layer is missing, or if there is another than these."""
    missing = sorted(set(needed) - set(tensors))
    extra = sorted(set(tensors) - {*needed, *optional})
    if not missing and not extra:
        return
    parts = [f"{name}.{suffix} is missing" for suffix in missing]
    parts += [f"{name}.{suffix} is not expected" for suffix in extra]
    raise CheckpointError(
        f"{'; '.join(parts)}: expected {', '.join(sorted(needed))}; found "
        f"{shown(', '.join(sorted(tensors)) or 'none')}"
    )


def checked(
    name: str,
    tensors: Mapping[str, Tensor],
    suffix: str,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
) -> Tensor:
    """A tensor of a layer, whose shape is the first or any other of `shapes`.

    Raises:
        CheckpointError: its shape or its dtype is another.
    """
    tensor = tensors[suffix]
    if tuple(tensor.shape) not in shapes or tensor.dtype not in dtypes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        actual = f"{shown(list(tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}"
        raise CheckpointError(f"{name}.{suffix}: expected {expected} {kinds}, found {actual}")
    return tensor
