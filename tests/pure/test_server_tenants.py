"""API keys, tenants and quotas."""

import json
from pathlib import Path

import pytest

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
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, text: str) -> None:
    """As a ConfigError with the file's path."""
    file = tmp_path / "keys.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.json"):
        ApiKeys.load(file)


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
