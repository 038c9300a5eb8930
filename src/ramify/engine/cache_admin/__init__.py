"""Cache administration: `llm.cache`, warm-up."""
