"""Additional frontends (--tokenizer-worker-num): serve token requests, forward the rest."""
