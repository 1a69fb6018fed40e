"""`tandem bootstrap`: a shared bootstrap server."""

import logging
from collections.abc import Sequence

from bootstrap_server.registry import BootstrapConfig
from deploy.flags import Parser, add_flags, config_from
from service.telemetry.context import set_up_logging


def run(argv: Sequence[str]) -> int:
    config = config_from(build_parser().parse_strict(argv), BootstrapConfig)
    set_up_logging(level=config.log_level, format=config.log_format, process="bootstrap")
    from bootstrap_server.app import run_bootstrap_server
    from disagg.config import read_secret
    from service.security.browser import require_secret

    secret = read_secret(config.cluster_secret_file)
    warning = require_secret(
        config.host,
        flag="--host",
        what="the bootstrap server",
        remedy="--cluster-secret-file",
        has_secret=secret is not None,
        allow_insecure=config.allow_insecure,
    )
    if warning is not None:
        logging.getLogger(__name__).warning(warning)
    run_bootstrap_server(config, secret=secret)
    return 0


def build_parser() -> Parser:
    parser = Parser(
        prog="tandem bootstrap",
        description="Run a bootstrap server on its own: prefill workers register with it "
        "(--disaggregation-bootstrap-server HOST:PORT), decode workers ask it where they are.",
    )
    add_flags(parser, BootstrapConfig, title="bootstrap server")
    return parser
