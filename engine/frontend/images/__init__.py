"""Images of prompts: fetching, decoding, placeholders. Never torch."""
