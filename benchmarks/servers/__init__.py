"""Servers side by side: `contract` first, then `cells` and `launches`; benchmarks/server.py runs them."""
