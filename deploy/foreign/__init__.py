"""Flags of SGLang and vLLM that are renamed or meaningless here."""
