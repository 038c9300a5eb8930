"""What operators use. `app`, `routes`, `context`, `run` and `http.uvicorn_server` import it.

- `cache_admin`: endpoints that look at the cache, pin, explain and evict.
- `health`: liveness and readiness, which `http.uvicorn_server` sets to draining.
- `metrics`: Prometheus. `load_monitor`: delay of the event loop, a log line with the load.
- `request_log`: log line and trace line of each request.
"""
