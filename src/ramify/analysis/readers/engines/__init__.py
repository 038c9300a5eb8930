"""Logs of inference servers: vLLM, SGLang, our own `--record`, and bare token ids."""
