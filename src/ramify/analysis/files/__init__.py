"""Files of logs as rows: opening, decompressing, splitting into values with line numbers."""
