"""Replicas on one machine that are given one cache directory."""

from pathlib import Path

import pytest

from ramify.cluster.cpu_shares import CpuShare
from ramify.cluster.local_processes import LocalOptions, LocalProcesses
from ramify.cluster.tier_shares import tier_share
from ramify.config import EngineConfig
from ramify.errors import ConfigError


def test_each_replica_has_a_directory_and_its_share_of_the_budget() -> None:
    """The budget is that of all of them; what else they are given is the same."""
    engine = {"cache_dir": "/cache", "cache_disk": "4GB", "max_num_seqs": 8}

    shares = [tier_share(engine, name, 4) for name in ("0", "1", "2", "3")]

    assert [share["cache_dir"] for share in shares] == [f"/cache/replica-{n}" for n in range(4)]
    assert {EngineConfig.of(**share).tiers.disk_bytes for share in shares} == {10**9}
    assert {share["max_num_seqs"] for share in shares} == {8}
    assert engine["cache_dir"] == "/cache"


def test_a_budget_that_is_not_given_is_shared_too() -> None:
    """The default is one for the machine."""
    share = tier_share({"cache_dir": "/cache"}, "0", 2)

    assert EngineConfig.of(**share).tiers.disk_bytes == 5 * 10**9


@pytest.mark.parametrize(
    ("engine", "num_replicas"),
    [
        ({"cache_dir": "/cache", "cache_disk": "4GB"}, 1),
        ({"cache_dir": "/cache", "cache_dir_readonly": True}, 4),
        ({"cache_store": "unix:///s"}, 4),
        ({}, 4),
    ],
)
def test_what_can_be_shared_is_left_alone(engine: dict[str, object], num_replicas: int) -> None:
    """One replica, readers of another process's pages, a server, and no tier at all."""
    assert tier_share(engine, "0", num_replicas) == engine


def test_a_budget_that_is_no_size_is_refused_before_a_replica_starts() -> None:
    """With the message of the option."""
    with pytest.raises(ConfigError, match="cache_disk='much'"):
        tier_share({"cache_dir": "/cache", "cache_disk": "much"}, "0", 2)


def test_local_replicas_get_their_directories(tmp_path: Path) -> None:
    """Of the options of `ramify serve --replicas N`."""
    options = LocalOptions(
        model="none", engine={"cache_dir": str(tmp_path)}, shares=[CpuShare(1)] * 2
    )

    children = LocalProcesses(options)._children

    directories = [child._spec.engine["cache_dir"] for child in children]
    assert directories == [str(tmp_path / "replica-0"), str(tmp_path / "replica-1")]
