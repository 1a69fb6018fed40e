"""Text and tokens, both ways: tokenizer, chat template, tokens as text as they come, stop patterns, tool calls. Never torch."""
