"""GGUF files: the container, and blocks of its types as quantised weights."""
