"""Text and tokens, both ways: tokenizer, chat template, incremental text, stop patterns, tool calls. Never torch."""
