"""A frontend process beside the main one (--tokenizer-worker-num): it answers requests for tokens, and forwards the rest to it."""
