"""Execution of step plans with torch."""
