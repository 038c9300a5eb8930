"""OpenAI API."""
