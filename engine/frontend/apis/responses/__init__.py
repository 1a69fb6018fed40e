"""OpenAI's Responses API, as a chat with items and typed events."""
