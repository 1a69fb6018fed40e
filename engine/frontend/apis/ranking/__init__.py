"""Rerankers and classifiers, in the forms of vLLM, Cohere and Jina."""
