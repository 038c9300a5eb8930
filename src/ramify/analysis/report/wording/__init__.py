"""Words that all formats share: `numbers`, `quotes` with marked changes, `causes`, the `headline`."""
