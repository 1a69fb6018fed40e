"""Server-sent events as bytes: where they end. Pure."""

MAX_EVENT_BYTES = 16 << 20  # an event longer than this is passed on in pieces

_ENDS = (b"\n\n", b"\r\n\r\n")


class SseSplitter:
    """Passes on whole events only, so that an error event may follow at any time and both can be parsed.

    Workers write whole events nearly always, so nearly always the chunk itself is returned.
    """

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, chunk: bytes) -> bytes:
        """All events that are complete now; the piece of the next one is kept."""
        data = self._tail + chunk if self._tail else chunk
        if data.endswith(_ENDS):
            self._tail = b""
            return data
        end = max(_end_of_last(data, end) for end in _ENDS)
        if end == 0 and len(data) > MAX_EVENT_BYTES:
            end = len(data)
        self._tail = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """What follows the last whole event, at the orderly end of a stream."""
        rest, self._tail = self._tail, b""
        return rest


def _end_of_last(data: bytes, separator: bytes) -> int:
    at = data.rfind(separator)
    return 0 if at < 0 else at + len(separator)
