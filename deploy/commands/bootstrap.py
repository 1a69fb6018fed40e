"""`tandem bootstrap`: a bootstrap server on its own, shared by several prefill workers. Never imports torch."""

import logging
from collections.abc import Sequence

from bootstrap_server.config import BootstrapConfig
from deploy.flags import Parser, add_flags, config_from
from service.telemetry.logs import FORMATS, set_up_logging


def run(argv: Sequence[str]) -> int:
    args = build_parser().parse_strict(argv)
    config = config_from(args, BootstrapConfig)
    set_up_logging(level=args.log_level, format=args.log_format, process="bootstrap")
    from bootstrap_server.server import run_bootstrap_server
    from disagg.config import read_secret
    from service.security.addresses import require_secret

    secret = read_secret(args.cluster_secret_file)
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
    parser.add_argument(
        "--cluster-secret-file", metavar="TEXT", help="file with the secret that all of the cluster's workers share"
    )
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="log level (default: info)"
    )
    parser.add_argument(
        "--log-format",
        default="text",
        choices=FORMATS,
        help="lines for people, or one JSON object each (default: text)",
    )
    return parser
