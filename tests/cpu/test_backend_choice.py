"""The choice of an attention backend: order of `auto`, reasons, errors, old names."""

import pytest
import torch

from ramify.attention.backend import BACKENDS, backend_class, select_backend
from ramify.errors import ConfigError, UnsupportedBackendError
from tests.cpu.test_backends import CPU, spec_of


def test_auto_prefers_the_exact_backend_on_cpu() -> None:
    """cpu serves every model on CPU; the choice has a reason for it and against each other."""
    for exact in (True, False):
        choice = select_backend("auto", spec_of(exact=exact), CPU)

        assert choice.name == "cpu"
        assert choice.reason
        assert set(choice.rejected) == set(BACKENDS) - {"cpu"}
        assert ("exact" in choice.rejected["sdpa"]) == exact


def test_an_unknown_backend_is_an_error_that_lists_all() -> None:
    """The error has the unknown name and every valid name."""
    with pytest.raises(ConfigError) as caught:
        select_backend("flashy", spec_of(), CPU)

    for word in ("flashy", "auto", *BACKENDS):
        assert word in str(caught.value)


def test_the_old_name_of_a_backend_still_works() -> None:
    """With a warning that has the new name."""
    with pytest.warns(DeprecationWarning, match="'tree' is deprecated; use 'cpu'"):
        assert backend_class("tree") is backend_class("cpu")
    with pytest.warns(DeprecationWarning, match="use 'cpu'"):
        assert select_backend("tree", spec_of(), CPU).name == "cpu"


def test_a_backend_that_cannot_serve_says_why() -> None:
    """sdpa is not exact and has no soft cap; the error carries the reason."""
    for changes, word in (({"exact": True}, "exact"), ({"soft_cap": 30.0}, "soft_cap")):
        spec = spec_of(**changes)
        reason = backend_class("sdpa").supports(spec, CPU)
        assert reason is not None
        assert word in reason

        with pytest.raises(UnsupportedBackendError) as caught:
            select_backend("sdpa", spec, CPU)

        assert reason in str(caught.value)


def test_auto_on_another_device_lists_every_reason() -> None:
    """If neither sdpa nor cpu can serve, eager does, and the choice has their reasons."""
    choice = select_backend("auto", spec_of(exact=True), torch.device("meta"))

    assert choice.name == "eager"
    assert set(choice.rejected) == set(BACKENDS) - {"eager"}
    assert "exact" in choice.rejected["sdpa"]
    assert "meta" in choice.rejected["cpu"]


def test_the_error_lists_all_reasons() -> None:
    """If no backend can serve, the message has a reason for each."""
    reasons = {"cpu": "device cuda: written for CPU", "sdpa": "exact=True: bits differ"}

    message = str(UnsupportedBackendError("auto", reasons))

    for name, reason in reasons.items():
        assert name in message and reason in message


def test_query_heads_must_divide_over_kv_heads() -> None:
    """The error names both numbers."""
    with pytest.raises(ConfigError, match=r"num_heads=5.*num_kv_heads=2"):
        spec_of(num_heads=5, num_kv_heads=2)
