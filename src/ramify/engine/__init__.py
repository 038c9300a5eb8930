"""Continuous batching around the cache: schedule → plan → execute → commit → update."""
