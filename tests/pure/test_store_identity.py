"""One field of an engine's identity changed: none of its pages hits, and the old ones still do."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ramify.engine.identity import ARITHMETIC_FIELDS, EngineIdentity
from tests.pure.store_cases import PAGE_BYTES, SEGMENT_BYTES, hits, opened, put

IDENTITY = EngineIdentity(
    weights="w",
    weight_types="bfloat16",
    model="m",
    kv_dtype="bfloat16",
    kv_layout="l",
    page_size=16,
    exact=True,
    arithmetic="torch 2, avx512",
    threads=2,
    sampling="exact",
)
PAGES = range(5)


def changed(name: str) -> EngineIdentity:
    """The identity with another value of a field."""
    value: Any = getattr(IDENTITY, name)
    other: Any = not value if value is True else value + ("x" if isinstance(value, str) else 1)
    return replace(IDENTITY, **{name: other})


def pages_found(directory: Path, identity: EngineIdentity, **options: Any) -> tuple[list[int], str]:
    """The pages that a start finds, and what it reports; it leaves a page of its own."""
    store = opened(directory, identity=identity.kv_fields(), **options)
    pages, report = hits(store, PAGES), store.start_report
    put(store, [PAGES.stop])
    store.close()
    return pages, report


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with pages of `IDENTITY`."""
    store = opened(tmp_path, identity=IDENTITY.kv_fields())
    put(store, PAGES)
    store.close()
    return tmp_path


@pytest.mark.parametrize("name", IDENTITY.kv_fields())
def test_a_change_of_one_field_gives_no_hit(directory: Path, name: str) -> None:
    """And is named at the start; the old identity finds every page afterwards."""
    pages, report = pages_found(directory, changed(name))

    assert pages == [] and f"{name} is " in report
    assert pages_found(directory, IDENTITY)[0] == list(PAGES)


@pytest.mark.parametrize(
    "options",
    [{"page_bytes": PAGE_BYTES + 1}, {"segment_bytes": SEGMENT_BYTES // 2}],
    ids=lambda options: next(iter(options)),
)
def test_another_geometry_of_the_files_gives_no_hit(
    directory: Path, options: dict[str, int]
) -> None:
    """Lengths of pages and segments belong to the identity of a directory."""
    pages, report = pages_found(directory, IDENTITY, **options)

    assert pages == [] and f"{next(iter(options))} is " in report
    assert pages_found(directory, IDENTITY)[0] == list(PAGES)


def test_every_field_but_sampling_is_one_of_the_stores() -> None:
    """A field that is added to the engine's identity counts for stores too, unless K/V is free of it."""
    names = {field.name for field in fields(EngineIdentity)}

    assert IDENTITY.kv_fields().keys() == names - {"sampling"}


@pytest.mark.parametrize("name", ARITHMETIC_FIELDS)
def test_without_exact_the_arithmetic_does_not_count(tmp_path: Path, name: str) -> None:
    """Another CPU, torch or number of threads reads the same pages under `exact=False`."""
    store = opened(tmp_path, identity=replace(IDENTITY, exact=False).kv_fields())
    put(store, PAGES)
    store.close()

    assert pages_found(tmp_path, replace(changed(name), exact=False))[0] == list(PAGES)
