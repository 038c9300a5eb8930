"""OpenAI's and Anthropic's APIs over one engine, with the reason for every miss."""
