"""Ollama's API: chats, prompts, and what its clients ask about models."""
