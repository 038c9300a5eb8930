"""Decoders of the quantised linear layers of safetensors checkpoints: tensors -> matrix."""
