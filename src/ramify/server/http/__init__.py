"""HTTP: wire format and uvicorn."""
