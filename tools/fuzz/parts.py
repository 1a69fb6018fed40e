"""Parts of `make fuzz` that run in this process: stories from bytes, drawn by hypothesis, until there were enough inputs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from hypothesis import HealthCheck, given, note, seed, settings

from tests.transfer.rig import until
from tools.fuzz import bodies, sockets
from tools.fuzz.answers import Answers
from tools.fuzz.clients import clients
from tools.fuzz.footprint import SETTLE_S, assert_no_leak, footprint, told
from tools.fuzz.progress import Progress
from tools.fuzz.source import STORY_BYTES
from tools.fuzz.story import Story

# Where it fails hypothesis shows the smallest story that does, and its seed.
ROUND = settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))
HALF = 1_000_000  # seeds of a second half begin so much later
COUNTED = {
    "junk_frames": "malformed",
    "protocol_errors": "out of turn",
    "refused": "refused",
    "succeeded": "good transfers' ends between them",
}
HERE = "the process"
POOLED = 8  # threads of two workers that start when there is work for them, and kept connections
UNPACKED_MIB = 160.0  # of a process with two workers: what bodies unpack to leaves room behind, once
GROWTH_MIB = 24.0  # of this process: hypothesis keeps something of its own


@dataclass(frozen=True)
class Asked:
    """`inputs`: the least number of inputs. Rounds have the seeds `seed`, `seed` + 1, ..."""

    inputs: int
    seed: int


def fuzz_frames(asked: Asked, progress: Progress) -> str:
    seen: Counter[str] = Counter()

    def one(data: bytes) -> int:
        story = Story()
        try:
            story.run(data)
        except BaseException:
            note("\n".join(story.steps))
            raise
        seen.update(stories=1, taken=story.num_taken, writes=story.num_writes)
        return story.num_frames

    held = _until_enough(asked, progress, one)
    return f"{seen['stories']:,} stories; {seen['taken']:,} frames were acted on, {seen['writes']:,} writes came of them; {held}"


def fuzz_sockets(asked: Asked, progress: Progress) -> str:
    """Half of it with CURVE."""
    open_half = _attack(None, Asked(asked.inputs // 2, asked.seed), progress)
    return f"{open_half}; CURVE: {_attack(sockets.SECRET, Asked(asked.inputs, asked.seed + HALF), progress)}"


def _attack(secret: bytes | None, asked: Asked, progress: Progress) -> str:
    with sockets.target(secret) as target:

        def one(data: bytes) -> int:
            before = target.num_frames
            target.attack(data)
            return target.num_frames - before

        held = _until_enough(asked, progress, one)
        target.assert_nothing_left()
        counters = [manager.counters for manager in (target.prefill, target.decode)]
        said = [f"{sum(c.get(name, 0) for c in counters):,} {what}" for name, what in COUNTED.items()]
        return f"{', '.join(said)}; {held}"


def fuzz_bodies(asked: Asked, progress: Progress) -> str:
    """Half of it signed."""
    open_half = _call(None, Asked(asked.inputs // 2, asked.seed), progress)
    return f"{open_half}; signed: {_call(bodies.SECRET, Asked(asked.inputs, asked.seed + HALF), progress)}"


def _call(secret: bytes | None, asked: Asked, progress: Progress) -> str:
    with bodies.called_server(secret) as caller:
        caller.run(bytes(8))
        num_tasks = caller.num_tasks

        def one(data: bytes) -> int:
            before = caller.num_calls
            caller.run(data)
            return caller.num_calls - before

        held = _until_enough(asked, progress, one)
        until(lambda: caller.num_tasks <= num_tasks, timeout_s=SETTLE_S, what="its tasks are as many as before")
        return f"{_told(caller.statuses)}; {held}"


def fuzz_answers(asked: Asked, progress: Progress) -> str:
    answers = Answers()

    def one(data: bytes) -> int:
        before = answers.num_answers
        answers.run(data)
        return answers.num_answers - before

    held = _until_enough(asked, progress, one)
    return f"{answers.num_calls:,} calls were found; {held}"


def fuzz_clients(asked: Asked, progress: Progress) -> str:
    with clients() as attack:

        def one(data: bytes) -> int:
            before = attack.num_calls
            attack.run(data)
            return attack.num_calls - before

        held = _until_enough(asked, progress, one, slack=POOLED, growth_mib=UNPACKED_MIB)
        return f"{_told(attack.statuses)}; {held}"


def _told(statuses: Counter[int]) -> str:
    return ", ".join(f"{count:,} x {status}" for status, count in sorted(statuses.items()))


def _until_enough(
    asked: Asked,
    progress: Progress,
    one: Callable[[bytes], int],
    *,
    slack: int = 0,
    growth_mib: float = GROWTH_MIB,
) -> str:
    """Rounds until that many inputs were seen in all; nothing may be held that was not held after the first tenth."""
    process, warm, number = psutil.Process(), None, asked.seed
    begun, warm_at = progress.done, progress.done + (asked.inputs - progress.done) / 10

    def step(data: bytes) -> None:
        progress.moves()
        progress.add(one(data))

    while progress.done < asked.inputs or warm is None:
        _round(number, step)
        number += 1
        if warm is None and progress.done >= warm_at and progress.done > begun:
            warm = footprint(process)
    after = assert_no_leak(process, warm, growth_mib=growth_mib, slack=slack, name=HERE)
    return told({HERE: warm}, {HERE: after})


def _round(number: int, one: Callable[[bytes], None]) -> None:
    @seed(number)
    @ROUND
    @given(STORY_BYTES)
    def run(data: bytes) -> None:
        one(data)

    run()
