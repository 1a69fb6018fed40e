"""The executor of a leader: every step goes to the followers, too, just before the leader's own rank runs it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from engine.core.plan import Plan, StepResult
from engine.ranks.followers import Followers, GroupEnded, Pending

if TYPE_CHECKING:  # it imports torch, which a group of simulated ranks does without
    from engine.executor.executor import Executor, Launch

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class GroupLaunch:
    """A step of all ranks. `answer`: of the followers, where no result says that they have run it."""

    own: "Launch"
    answer: Pending | None

    @property
    def plan(self) -> Plan:
        return self.own.plan


class LeadingExecutor:
    """Sampling stays here: the followers get the sampled tokens through the future map."""

    def __init__(self, own: "Executor", followers: Followers, *, attention: Callable[[], None] | None = None) -> None:
        """`attention` is called in any thread when a step has ended; None: the caller waits in `collect`."""
        self._own = own
        self._attention = attention
        self.runner = own.runner
        self.followers = followers

    def launch(self, plan: Plan) -> GroupLaunch:
        answer = self.followers.step(plan)
        launch = GroupLaunch(self._own.launch(plan), answer)
        self._watch(launch)
        return launch

    def launch_forward(self, plan: Plan) -> GroupLaunch:
        answer = self.followers.step(plan)
        return GroupLaunch(self._own.launch_forward(plan), answer)

    def launch_sampling(self, launch: GroupLaunch) -> None:
        self._own.launch_sampling(launch.own)
        self._watch(launch)

    def ended(self, launch: GroupLaunch) -> bool:
        """Whether `collect` returns at once."""
        sampling = launch.own.sampling
        return sampling is not None and sampling.done() and (launch.answer is None or launch.answer.there())

    def _watch(self, launch: GroupLaunch) -> None:
        attention, sampling = self._attention, launch.own.sampling
        if attention is None:
            return
        assert sampling is not None
        sampling.add_done_callback(lambda _: attention())
        if launch.answer is not None:
            launch.answer.when_there(attention)

    def collect(self, launch: GroupLaunch) -> StepResult:
        """Collect a step as `Executor.collect` does. Raises GroupEnded for a step without results: other ranks have computed it."""
        if launch.answer is not None:
            launch.answer.wait()
        result = self._own.collect(launch.own)
        if result.failure:
            raise GroupEnded(
                f"step {result.seq}: the other ranks are ahead of this one, which failed: {result.failure}"
            )
        return result

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the leader's own rank behind every launched step."""
        return self._own.call(work)

    def close(self) -> None:
        self.followers.close()
        self._own.close()
