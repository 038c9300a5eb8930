"""OpenTelemetry: a trace of each request and the metrics of `/metrics`, sent to a collector by OTLP.

- `options`: where to send them; needs no package of the extra.
- `request_spans`: the spans of an ended request, as plain values.
- `metric_points`: the families of a Prometheus registry as OTLP metrics.
- `export`: queue, threads and exporters; with `metric_points`, all that imports `opentelemetry`.
- `server_telemetry`: what the server calls.
"""
