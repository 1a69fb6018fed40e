"""Template values that are both text and object or list."""

import json
from collections.abc import Iterable
from typing import Any

from service.http.json_depth import object_of


class _Written:
    def __add__(self, other: Any) -> Any:
        return str(self) + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return other + str(self) if isinstance(other, str) else NotImplemented


class TextPart(_Written, dict[str, Any]):
    def __init__(self, text: str) -> None:
        super().__init__(type="text", text=text)

    def __str__(self) -> str:
        return str(self["text"])


class Parts(_Written, list[Any]):
    """Parts of a content; as text, one per line."""

    @classmethod
    def of_text(cls, text: str) -> "Parts":
        return cls([TextPart(text)])

    def __str__(self) -> str:
        return joined(self)

    def __bool__(self) -> bool:
        """False if all texts are empty."""
        return any(str(part) if isinstance(part, TextPart) else True for part in self)

    def __contains__(self, item: object) -> bool:
        return item in str(self) if isinstance(item, str) else super().__contains__(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(str(self), name)


class CallArguments(_Written, dict[str, Any]):
    """Arguments of a call: the object in `text`, rendered as `text`; empty for other JSON."""

    def __init__(self, text: str) -> None:
        super().__init__(object_of(text.encode()))
        self._text = text

    @classmethod
    def of(cls, given: Any) -> "CallArguments":
        """`given`: JSON text, or the value."""
        if isinstance(given, str):
            return cls(given or "{}")
        return cls(json.dumps({} if given is None else given, ensure_ascii=False))

    def __str__(self) -> str:
        return self._text


def joined(parts: Iterable[Any]) -> str:
    """Texts of parts, one per line, as in vLLM."""
    return "\n".join(str(part) for part in parts if isinstance(part, TextPart))
