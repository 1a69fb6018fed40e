"""The port that the router listens at."""

import errno

from aiohttp import web

from router.config import RouterConfig
from service.flags import ConfigError
from service.http.server import Limits


def limits_of(config: RouterConfig) -> Limits:
    """What clients may send, and how slowly."""
    return Limits(
        max_body_bytes=config.max_body_bytes,
        header_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
        size_flag="--max-body-bytes",
        time_flag="--body-timeout-s",
    )


async def listen(runner: web.ServerRunner, config: RouterConfig, *, shared: bool) -> int:
    """Bind; the port that was taken (config.port may be 0)."""
    site = web.TCPSite(runner, config.host, config.port, reuse_port=shared or None)
    try:
        await site.start()
    except OSError as err:
        raise ConfigError(_listen_message(config, err)) from None
    return next(int(address[1]) for address in runner.addresses if isinstance(address, tuple))


def _listen_message(config: RouterConfig, err: OSError) -> str:
    if err.errno == errno.EADDRINUSE:
        return f"--port: {config.host}:{config.port} is taken; choose another --port (0: a free one)"
    return f"--host/--port: cannot listen on {config.host}:{config.port}: {err.strerror or err}"


def url_host(host: str) -> str:
    """How a client on this machine reaches us."""
    if host in ("", "0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
