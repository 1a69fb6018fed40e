"""A chat, however its API writes it: from messages and tools to a plan, and from the answer to its parts."""
