"""`--fake-transfer-delay` and `--fake-transfer-failure-rate`: what a user's CI rehearses without a real engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

from engine.model_files.model_config import DEFAULT_MODEL_PATH
from tests.e2e.two_engines import REST_S, Outputs, disaggregated

DELAY_S = 0.3


def test_a_transfer_takes_at_least_the_delay() -> None:
    began_s = monotonic()
    with answered(fake_transfer_delay_s=DELAY_S) as outputs:
        assert monotonic() - began_s >= DELAY_S
        assert len(outputs.tokens["r"]) == 4 and not outputs.aborted


def test_a_failed_transfer_ends_its_request_and_frees_its_memory() -> None:
    with answered(fake_transfer_failure_rate=1.0) as outputs:
        assert outputs.aborted.keys() == {"r"} and not outputs.tokens["r"]


@contextmanager
def answered(**fake: Any) -> Iterator[Outputs]:
    """What decode reported of one request through a pair with these flags; all memory is back."""
    disagg = {"disaggregation_transfer_backend": "fake", **fake}
    with disaggregated(DEFAULT_MODEL_PATH, decode={}, max_total_tokens=1024, disagg=disagg) as pair:
        decode = pair.workers[-1]
        pair.submit("r", list(range(1, 40)), new=4)
        deadline_s = monotonic() + REST_S
        while not decode.outputs.ended or not all(worker.at_rest for worker in pair.workers):
            assert monotonic() < deadline_s, [worker.queues() for worker in pair.workers]
            if not any([worker.turn() for worker in pair.workers]):
                sleep(0.0005)
        for worker in pair.workers:
            worker.check()
        yield decode.outputs
