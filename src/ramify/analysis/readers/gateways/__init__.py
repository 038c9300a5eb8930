"""Logs of gateways, tracers and browsers: LiteLLM, Langfuse, Helicone, LangSmith, CSV, HAR."""
