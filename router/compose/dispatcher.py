"""The dispatcher, with the enabled parts."""

import math

from router.attempts.pair_attempt import AttemptLauncher
from router.attempts.request import Slo
from router.choice.policies import Chooser
from router.compose.exposure import ways_of
from router.compose.parts import Owners, make_parts
from router.config import RouterConfig
from router.requests.dispatch import Dispatcher
from router.requests.picking import Picker
from router.requests.route_choice import RouteChooser


def make_dispatcher(config: RouterConfig, owners: Owners, launcher: AttemptLauncher, chooser: Chooser) -> Dispatcher:
    admission, ways = owners.admission, None
    if config.mixed:
        wanted = Slo(config.mixed_ttft_s, config.mixed_itl_s)
        ways = RouteChooser(policies=chooser.policies, forecast=admission.forecast, wanted=wanted)
    picker = Picker(
        table=launcher.table,
        policies=chooser.policies,
        look_in_time=admission.look_in_time,
        wait_s=config.retry_wait_s,
        silence_s=config.dead_worker_timeout_s,
        clock=launcher.clock,
        ways=ways,
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
