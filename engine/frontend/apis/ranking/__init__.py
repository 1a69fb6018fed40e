"""Pairs of texts and classes: rerankers and classifiers, after vLLM, Cohere and Jina."""
