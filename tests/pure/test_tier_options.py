"""Options of the cache tiers: sizes, and what is refused at start."""

from pathlib import Path
from typing import Any

import pytest

from ramify.config import EngineConfig
from ramify.errors import ConfigError
from ramify.tier_options import parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("50GB", 50 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5 gib", 3 << 29),
        ("4096", 4096),
        ("2k", 2000),
        (4096, 4096),
        ("0", 0),
    ],
)
def test_a_size_is_a_number_with_or_without_a_unit(text: object, num_bytes: int) -> None:
    """Decimal units, and binary ones with an i."""
    assert parse_size("cache_disk", text) == num_bytes


@pytest.mark.parametrize("value", ["", "GB", "5XB", "-1", "1e9", "5iB", True, -1, 1.5, None])
def test_what_is_no_size_is_refused(value: object) -> None:
    """The message names the value and the way out."""
    with pytest.raises(ConfigError, match="must be a number of bytes, or like 50GB"):
        parse_size("cache_disk", value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_disk": "much"}, "cache_disk='much'"),
        ({"cache_dir": "x", "cache_disk": "0"}, "must be above 0"),
        ({"cache_dir_readonly": True}, "without cache_dir"),
        ({"cache_dir": "x", "cache_dir_readonly": 1}, "must be True or False"),
        ({"cache_dir": ""}, "must be a directory"),
        ({"cache_key": "key"}, "cache_key='key' without cache_dir and cache_store"),
        ({"cache_key": "key", "cache_host": "1GB"}, "without cache_dir"),
        (
            {"cache_store": "localhost:6379"},
            "cache_store='localhost:6379' but it must be valkey://",
        ),
        ({"cache_store": "http://:secret@host"}, "cache_store=http://… but"),
        ({"cache_store": "valkey://"}, r"or unix://PATH"),
        ({"cache_store": 6379}, "cache_store=6379 but"),
        ({"cache_store": "unix:///s", "prefix_cache": False}, "need prefix_cache=True"),
        ({"cache_dir": "x", "cache_key": ""}, "must be a file"),
        ({"cache_dir": "x", "cache_cost": ""}, "must be a file"),
        ({"cache_cost": "cost.json"}, "without cache_dir, cache_host or cache_store"),
        ({"cache_dir": "x", "prefix_cache": False}, "need prefix_cache=True"),
        ({"cache_host": "1GB", "prefix_cache": False}, "need prefix_cache=True"),
    ],
)
def test_an_impossible_option_is_refused(options: dict[str, Any], message: str) -> None:
    """Before any weight is read."""
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of(**options)


def test_a_directory_may_be_a_path() -> None:
    """Without a directory and a host size there are no tiers."""
    assert EngineConfig.of(cache_dir=Path("x")).tiers.cache_dir == "x"
    assert EngineConfig.of(cache_dir="x", cache_key=Path("key")).tiers.cache_key == "key"
    assert EngineConfig.of(cache_dir="x", cache_cost=Path("cost")).tiers.cache_cost == "cost"
    assert EngineConfig.of(cache_dir="x").tiers.is_used
    assert EngineConfig.of(cache_store="unix:///s", cache_key="key").tiers.is_used
    assert EngineConfig.of(cache_host="1GB").tiers.is_used
    assert not EngineConfig.of(cache_host="0").tiers.is_used
    assert not EngineConfig.of().tiers.is_used
