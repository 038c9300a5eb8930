"""Transcripts of agents and chats: Claude Code, Codex, ShareGPT."""
