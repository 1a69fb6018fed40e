"""docs/api.md: routes and fields beside those of SGLang and vLLM."""
