"""Ollama's API: chats, prompts, models."""
