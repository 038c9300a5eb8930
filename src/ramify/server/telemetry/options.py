"""Where to send traces and metrics: `--otlp-endpoint`, and OpenTelemetry's own environment variables."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ramify.errors import ConfigError, MissingPackageError

logger = logging.getLogger(__name__)

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOLS = ("", "http/protobuf")
INTERVAL_S = 60.0  # between two reports of metrics, as OpenTelemetry's specification has it
QUEUE_SPANS = 2048  # the same
MAX_INTERVAL_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpOptions:
    """What is sent where.

    Args:
        endpoint: base URL of the collector, to which /v1/traces and /v1/metrics are added; "": the
            exporters read OTEL_EXPORTER_OTLP_ENDPOINT and its variants for each signal.
        interval_s: between two reports of metrics.
        max_queued_spans: further spans are dropped and counted.
    """

    endpoint: str = ""
    traces: bool = True
    metrics: bool = True
    interval_s: float = INTERVAL_S
    max_queued_spans: int = QUEUE_SPANS

    def url(self, signal: str) -> str | None:
        """The URL of "traces" or "metrics"; None: the exporter's own, from the environment."""
        return f"{self.endpoint.rstrip('/')}/v1/{signal}" if self.endpoint else None

    @classmethod
    def of(
        cls, endpoint: str | None, environment: Mapping[str, str] = os.environ
    ) -> OtlpOptions | None:
        """The options of `--otlp-endpoint` and the environment; None: nothing is sent.

        `OTEL_EXPORTER_OTLP_ENDPOINT` alone also sends. Where an operator of a cluster sets it for all
        programs, a server without the extra starts all the same, with a warning.

        Raises:
            ConfigError: an endpoint, protocol or number is none that works.
            MissingPackageError: the flag is given, and the extra is not installed.
        """
        base = endpoint if endpoint is not None else environment.get(ENDPOINT, "")
        if not base or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return None
        name = ENDPOINT if endpoint is None else "--otlp-endpoint"
        parts = urlsplit(base)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"{name} {base!r} is no URL; give http://HOST:4318")
        protocol = environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").strip()
        if protocol not in PROTOCOLS:
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, but only http/protobuf is sent here; "
                "unset it, and give the collector's port for HTTP (4318)"
            )
        signals = {
            signal: environment.get(f"OTEL_{signal}_EXPORTER", "").strip().lower() != "none"
            for signal in ("TRACES", "METRICS")
        }
        try:
            import_opentelemetry()
        except MissingPackageError as error:
            if endpoint is not None:
                raise
            logger.warning("%s is set, but nothing is sent: %s", ENDPOINT, error)
            return None
        interval_ms = _number(
            environment, "OTEL_METRIC_EXPORT_INTERVAL", 1000 * INTERVAL_S, 1000 * MAX_INTERVAL_S
        )
        return cls(
            endpoint=endpoint or "",
            traces=signals["TRACES"],
            metrics=signals["METRICS"],
            interval_s=interval_ms / 1000,
            max_queued_spans=int(
                _number(environment, "OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SPANS, 1 << 20)
            ),
        )


def _number(environment: Mapping[str, str], name: str, default: float, limit: float) -> float:
    text = environment.get(name, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= limit:
        raise ConfigError(f"{name} is {text!r}; give a whole number from 1 to {limit:.0f}")
    return float(text)


def import_opentelemetry() -> None:
    """Import what `export` needs.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise MissingPackageError("opentelemetry-sdk", "otel") from None
