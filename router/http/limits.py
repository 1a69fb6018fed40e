"""What the router's clients may send."""

from router.config import RouterConfig
from service.http.server import RequestLimits


def limits_of(config: RouterConfig) -> RequestLimits:
    """What clients may send, and how slowly."""
    return RequestLimits(
        max_body_bytes=config.max_body_bytes,
        header_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
        size_flag="--max-body-bytes",
        time_flag="--body-timeout",
    )
