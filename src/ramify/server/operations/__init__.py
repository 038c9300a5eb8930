"""Operations: admin endpoints of the cache, metrics, request log.

- `cache_admin`: endpoints that look at the cache, pin, explain and evict.
- `metrics`: Prometheus. `load_monitor`: delay of the event loop, a log line with the load.
- `request_log`: log line and trace line of each request. `stderr_writer`: stderr that never blocks.
- `engine_end`: ends an engine, and the process where a step is stuck.

`app`, `routes`, `context` and `run` import it.
"""
