"""Words that all writers share: `numbers`, `quotes` with marked changes, `causes`, the `headline`."""
