"""A small fixed share of `make fuzz`: the same inputs each time."""

from hypothesis import HealthCheck, given, settings

from tests.fuzz.bodies import CALLS, called_server
from tests.fuzz.frames import STORIES, Steps, Story

SHARE = settings(
    deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False
)


@settings(SHARE, max_examples=150)
@given(STORIES)
def test_frames(steps: Steps) -> None:
    Story().run(steps)


def test_bootstrap_bodies() -> None:
    with called_server() as caller:

        @settings(SHARE, max_examples=40)
        @given(CALLS)
        def run(calls: list[tuple[tuple[str, str], str, bytes]]) -> None:
            caller.run(calls)

        run()
        assert caller.num_calls > 100 and caller.statuses.keys() >= {200, 400, 404, 405}, caller.statuses
