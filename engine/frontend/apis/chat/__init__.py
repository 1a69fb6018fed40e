"""Chats of any API: messages and tools to a plan, answers to parts."""
