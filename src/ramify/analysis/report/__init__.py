"""What an analysis looks like: terminal, JSON, Markdown, HTML and SARIF."""
