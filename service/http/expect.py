"""The answer to `Expect: 100-continue` (curl sends it above 1 MiB). Other expectations are ignored (RFC 9110, 10.1.1)."""

from aiohttp import HttpVersion11, web


async def say_continue(request: web.BaseRequest) -> None:
    """Answer a client that waits before it sends its body."""
    if request.version == HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the answer has been written yet
