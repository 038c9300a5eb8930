"""The engine thread and the streams it feeds."""
