"""Flags of SGLang and vLLM that have another name here, or no meaning: what to make of them."""
