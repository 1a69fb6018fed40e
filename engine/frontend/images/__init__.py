"""Images of prompts: from the parts of a request to pixels, and from places in a prompt to the tokens that stand for them. Never torch."""
