"""Building blocks by their known names, for learning and prototypes: see docs/building-blocks.md."""
