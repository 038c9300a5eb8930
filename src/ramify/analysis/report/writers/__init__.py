"""Formats that a report is written in; each file is independent of the others."""
