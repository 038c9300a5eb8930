"""Rules that name causes of lost hits."""
