"""Whole engines side by side: what engine.py and perf.py are made of."""
