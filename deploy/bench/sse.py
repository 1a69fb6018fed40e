"""Server-sent events, as far as OpenAI-style servers use them: bytes in, the text after `data:` out. Pure."""


class SseParser:
    """Takes bytes in pieces of any size; returns the data of an event once its line is complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of each `data:` line that `chunk` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
