"""Names of models in requests."""

LATEST = ":latest"


def untagged(name: str) -> str:
    """Drop the tag that Ollama's clients add."""
    return name.removesuffix(LATEST)
