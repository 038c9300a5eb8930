"""Quantised linear layers of safetensors checkpoints: what `quantization_config` says, and their decoders."""
