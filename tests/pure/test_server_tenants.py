"""API keys, tenants and quotas."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ramify.cli import app
from ramify.errors import ConfigError
from ramify.server.errors import ApiError
from ramify.server.tenants import ApiKeys, Caller, Quota, QuotaMeter, hash_key


def key_file(path: Path, *entries: dict[str, object]) -> Path:
    file = path / "keys.json"
    file.write_text(json.dumps({"keys": list(entries)}))
    return file


def test_a_key_names_its_tenant(tmp_path: Path) -> None:
    """By the entry with the key's hash; the file holds no key in clear."""
    file = key_file(
        tmp_path,
        {"hash": hash_key("one"), "tenant": "ann", "quota": {"max_requests": 2}},
        {"hash": hash_key("two"), "admin": True},
    )
    keys = ApiKeys.load(file)

    assert keys.caller("one") == Caller("ann", quota=Quota(max_requests=2))
    assert keys.caller("two").is_admin
    assert keys.caller("two").tenant not in ("", "ann", "two")
    assert "one" not in file.read_text().replace("hash", "")


@pytest.mark.parametrize("key", [None, "", "three", "x" * 10_000, "\ud800"])
def test_nobody_else_gets_in(key: str | None) -> None:
    """401 without a key, and with an unknown key."""
    with pytest.raises(ApiError) as caught:
        ApiKeys.of("one").caller(key)
    assert caught.value.status == 401
    assert caught.value.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"keys": []}',
        '{"keys": [{}]}',
        '{"keys": [{"hash": "plain"}]}',
        '{"keys": [{"hash": "sha256:12"}]}',
        json.dumps({"keys": [{"hash": hash_key("a"), "quota": {"x": 1}}]}),
        json.dumps({"keys": [{"hash": hash_key("a"), "name": 1}]}),
        json.dumps({"keys": [{"hash": hash_key("a"), "quota": {"max_requests": "5"}}]}),
        json.dumps({"keys": [{"hash": hash_key("a"), "quota": {"tokens_per_minute": 0}}]}),
        json.dumps({"keys": [{"hash": hash_key("a"), "quota": {"max_pinned_share": 25}}]}),
        json.dumps({"keys": [{"hash": hash_key("a"), "tenant": "public"}]}),  # ends others' pins
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, text: str) -> None:
    """As a ConfigError with the file's path."""
    file = tmp_path / "keys.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.json"):
        ApiKeys.load(file)


def test_a_key_that_no_server_would_take_is_not_written(tmp_path: Path) -> None:
    """`ramify keys` leaves the file as it was."""
    file = tmp_path / "keys.json"
    for tenant, code in (("public", 2), ("ann", 0), ("public", 2)):
        result = CliRunner().invoke(app, ["keys", str(file), "--tenant", tenant])
        assert result.exit_code == code
    assert [path.name for path in tmp_path.iterdir()] == ["keys.json"]
    assert ApiKeys.load(file).num_tenants == 1


def refusal(meter: QuotaMeter, caller: Caller, num_tokens: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        meter.acquire(caller, num_tokens)
    assert caught.value.status == 429
    assert caught.value.headers["Retry-After"]
    return caught.value


def test_quotas_are_each_tenants_own() -> None:
    """A rejected request is not counted; an ended one no longer is."""
    time = [0.0]
    meter = QuotaMeter(clock=lambda: time[0])
    ann = Caller("ann", quota=Quota(max_requests=2, max_waiting_tokens=100))
    meter.acquire(ann, 60)
    refusal(meter, ann, 50)
    meter.acquire(ann, 40)
    refusal(meter, ann, 0)
    meter.acquire(Caller("bob"), 10_000)
    meter.release(ann, 60, 60)
    meter.acquire(ann, 60)


def test_tokens_per_minute_come_back_with_time() -> None:
    """A request may overdraw the allowance; the next is admitted once it has refilled."""
    time = [0.0]
    meter = QuotaMeter(clock=lambda: time[0])
    ann = Caller("ann", quota=Quota(tokens_per_minute=600))
    meter.acquire(ann, 10)
    meter.release(ann, 10, 900)
    wait = refusal(meter, ann, 1).retry_after_s
    assert wait is not None
    time[0] += wait
    meter.acquire(ann, 1)


def test_a_key_without_a_rate_leaves_the_debt_of_its_tenant() -> None:
    """What another key has used still counts, and what this one computes counts too."""
    time = [0.0]
    meter = QuotaMeter(clock=lambda: time[0])
    rated, free = Caller("ann", quota=Quota(tokens_per_minute=600)), Caller("ann")
    meter.acquire(rated, 10)
    meter.release(rated, 10, 1800)
    before = refusal(meter, rated, 1).retry_after_s
    for _ in range(2):
        meter.acquire(free, 10)
        meter.release(free, 10, 0)

    assert refusal(meter, rated, 1).retry_after_s == before == 121
    meter.acquire(free, 1)
    meter.release(free, 1, 600)
    assert refusal(meter, rated, 1).retry_after_s == 181
    assert meter.num_live == 0


def test_keys_of_one_tenant_have_the_smallest_of_its_limits() -> None:
    """Whichever key asks, the tenant's quota is the same; other tenants keep theirs."""
    keys = ApiKeys(
        {
            hash_key("one"): Caller("ann", quota=Quota(max_requests=5, tokens_per_minute=900)),
            hash_key("two"): Caller("ann", is_admin=True, quota=Quota(max_requests=3)),
            hash_key("six"): Caller("bob", quota=Quota(max_cached_share=None)),
        }
    )

    quotas = [keys.caller(name).quota for name in ("one", "two", "six")]

    assert quotas[0] == quotas[1] == Quota(max_requests=3, tokens_per_minute=900)
    assert quotas[2].max_cached_share is None
    assert keys.caller("two").is_admin


def test_each_answer_of_a_request_counts() -> None:
    """429 beyond the limit, and 400 where no waiting would help."""
    meter = QuotaMeter()
    ann = Caller("ann", quota=Quota(max_requests=10))
    meter.acquire(ann, 5, 8)
    meter.acquire(ann, 5, 2)
    refusal(meter, ann, 5)
    meter.release(ann, 5, 0, 2)

    with pytest.raises(ApiError) as caught:
        meter.acquire(ann, 5, 11)

    assert (caught.value.status, caught.value.param) == (400, "n")
    assert meter.num_live == 8
