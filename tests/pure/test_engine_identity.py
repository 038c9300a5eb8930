"""`EngineIdentity`: engines with equal identities compute equal bits; a difference has a name."""

from dataclasses import fields, replace
from typing import Any

import pytest

from ramify.engine.identity import WEIGHT_FIELDS, EngineIdentity
from tests.pure.engine_bench import Bench

BASE = EngineIdentity(
    weights="w",
    weight_types="t",
    model="m",
    kv_dtype="float32",
    kv_layout="l",
    page_size=16,
    exact=True,
    arithmetic="a",
    threads=2,
    sampling="exact",
)


def changed(name: str) -> EngineIdentity:
    value: Any = getattr(BASE, name)
    other: Any = value + "x" if isinstance(value, str) else value + 1
    return replace(BASE, **{name: other})


@pytest.mark.parametrize("name", [field.name for field in fields(EngineIdentity)])
def test_each_field_counts_and_is_named(name: str) -> None:
    """A change of any field changes the digest, and the mismatch names it with both values."""
    other = changed(name)

    assert other.digest != BASE.digest
    assert BASE.differing(other) == (name,)
    mismatch = BASE.mismatch(other)
    assert mismatch is not None
    for part in (name, repr(getattr(BASE, name)), repr(getattr(other, name))):
        assert part in mismatch
    assert BASE.has_same_weights(other) is (name not in WEIGHT_FIELDS)


def test_equal_identities_have_no_mismatch() -> None:
    """Two values with equal fields are the same identity, and say so."""
    copy = replace(BASE)

    assert (copy.digest, copy.mismatch(BASE)) == (BASE.digest, None)


def test_an_engine_without_a_checkpoint_is_its_namespace() -> None:
    """Two such engines are equal where namespace and page size are, though each is a life of its own."""
    first, second = (Bench(page_size=size).core for size in (4, 8))
    here, again, there = (
        EngineIdentity.of_namespace(core.namespaces.base, core.config)
        for core in (first, first, second)
    )

    assert here == again
    assert here.differing(there) == ("page_size",)
    assert first.incarnation != second.incarnation
    assert 0 <= first.incarnation < 2**64
