"""OpenAI's API: completions, chats, embeddings, models."""
