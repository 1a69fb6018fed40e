"""Names of models as clients write them."""

LATEST = ":latest"


def untagged(name: str) -> str:
    """The name without the tag that Ollama's clients add to it."""
    return name.removesuffix(LATEST)
