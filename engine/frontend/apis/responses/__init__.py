"""OpenAI's Responses API: a body becomes a chat, and the chat's answer items and typed events."""
