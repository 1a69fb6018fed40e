"""Label selectors as SGLang's router takes them: KEY=VALUE, several must all hold. Pure."""

from collections.abc import Sequence


class Selector:
    """KEY=VALUE requirements; all must hold."""

    def __init__(self, parts: Sequence[str]) -> None:
        """Raises ValueError for a part that is not KEY=VALUE."""
        words = [word for part in parts for word in part.split()]
        for word in words:
            key, equals, value = word.partition("=")
            if not (key and equals) or "=" in value or "," in word:
                raise ValueError(f"{word!r} is not KEY=VALUE")
        self._pairs = dict(word.split("=", 1) for word in words)

    def __bool__(self) -> bool:
        return bool(self._pairs)

    @property
    def query(self) -> str:
        """As the API server's `labelSelector` wants it."""
        return ",".join(f"{key}={value}" for key, value in self._pairs.items())
