"""The dispatcher, with the enabled parts of requests."""

import math
from dataclasses import dataclass
from functools import partial

import aiohttp

from router.attempts.pair_attempt import AttemptLauncher
from router.attempts.request import ITL_HEADER, TTFT_HEADER, ServePart
from router.body import ALONE, Api
from router.choice.policies import Chooser
from router.client.credentials import Credentials
from router.compose.exposure import ways_of
from router.config import RouterConfig
from router.parts.admission import PRIORITY_HEADER, Admission
from router.parts.encoders import Encoders
from router.parts.failover import Failover
from router.parts.images import BodyImages
from router.parts.kept_alive import serve_kept_alive
from router.parts.reconnect import Reconnect
from router.requests.answer import ClientAnswer
from router.requests.dispatch import Dispatcher, LiveRequests, RequestParts
from router.requests.picking import Picker
from router.requests.responses import Responses, SharedBook
from router.requests.route_choice import RouteChooser
from service.http.guard import ENVOY_HEADER, RANK_HEADER, SESSION_HEADER, TIMEOUT_HEADER
from service.http.keep_alive import NO_BEATS_HEADER
from service.http.resume import FRAMES_HEADER

_PASSED = (
    *("traceparent", "tracestate", TIMEOUT_HEADER, ENVOY_HEADER),
    *(PRIORITY_HEADER, TTFT_HEADER, ITL_HEADER, RANK_HEADER, SESSION_HEADER),
)


@dataclass(frozen=True, kw_only=True)
class Owners:
    """Objects whose methods are parts, in one router process."""

    admission: Admission
    encoders: Encoders
    book: SharedBook | None
    live: LiveRequests
    credentials: Credentials
    session: aiohttp.ClientSession


def make_parts(config: RouterConfig, owners: Owners, launcher: AttemptLauncher, picker: Picker) -> RequestParts:
    images = BodyImages(config, part_of=owners.encoders.part_of, most_bytes=config.max_body_bytes)
    framed = config.failover_max > 0 and launcher.secret is not None
    return RequestParts(
        gates=(owners.live.refuse_if_draining, owners.admission.refuse_early),
        bodies=(Responses(book=owners.book), images),
        around=(*_connection_parts(config, owners, launcher), owners.admission.around),
        answer=(
            Failover(most=config.failover_max, retry_max=config.retry_max, picker=picker).open
            if config.failover_max
            else ClientAnswer
        ),
        passed=_PASSED,
        by_api={api: {FRAMES_HEADER: "1"} for api in Api if framed and api not in ALONE},
        streams={NO_BEATS_HEADER: "1"},
    )


def _connection_parts(config: RouterConfig, owners: Owners, launcher: AttemptLauncher) -> list[ServePart]:
    parts: list[ServePart] = []
    if config.resume_window_s and launcher.secret is not None:
        reconnect = Reconnect(
            window_s=config.resume_window_s,
            table=launcher.table,
            session=owners.session,
            credentials=owners.credentials,
            secret=launcher.secret,
        )
        parts.append(reconnect.around)
    if config.sse_keep_alive_interval_s:
        parts.append(partial(serve_kept_alive, interval_s=config.sse_keep_alive_interval_s))
    return parts


def make_dispatcher(config: RouterConfig, owners: Owners, launcher: AttemptLauncher, chooser: Chooser) -> Dispatcher:
    admission, table = owners.admission, launcher.table
    routes = RouteChooser(
        policies=chooser.policies,
        forecast=admission.forecast,
        worker_of=table.get,
        index=chooser.index,
        fixed=config.route != "auto",
    )
    picker = Picker(
        table=table,
        look_in_time=admission.look_in_time,
        wait_s=config.retry_wait_s,
        silence_s=config.dead_worker_timeout_s,
        clock=launcher.clock,
        routes=routes,
    )
    return Dispatcher(
        ways=ways_of(config),
        picker=picker,
        chooser=chooser,
        launcher=launcher,
        live=owners.live,
        credentials=owners.credentials,
        retry_max=config.retry_max,
        retry_backoff_s=config.retry_backoff_s,
        max_deaths=config.failover_max or math.inf,
        parts=make_parts(config, owners, launcher, picker),
    )
