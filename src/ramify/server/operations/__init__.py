"""Endpoints and loops for operators."""
