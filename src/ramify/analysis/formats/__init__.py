"""The formats of logs, a file for each family."""
