"""Continuous batching: queues, prefill admission, step plans."""
