"""From logits to tokens: filters, penalties, masks of grammars, noise and logprobs."""
