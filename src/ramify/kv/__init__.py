"""Where K/V bytes live: block tables (plain arrays) and pools (tensors)."""
