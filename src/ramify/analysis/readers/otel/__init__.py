"""OpenTelemetry GenAI in its dialects: rows (`otlp_rows`), values, attributes, messages, requests."""
