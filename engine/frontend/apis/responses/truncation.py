"""`truncation: auto`: drops the oldest turns, never instructions."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from engine.frontend.apis.chat.body import ChatMessage
from engine.frontend.apis.chat.plan import ChatPlan
from engine.frontend.apis.shared.fields import CONTEXT_EXCEEDED
from service.http.errors import ApiError


@dataclass(frozen=True)
class Turns:
    """The conversation by turns.

    `head`: leading system messages, kept. `starts`: possible starts, at user messages.
    """

    messages: list[ChatMessage]
    head: int
    starts: list[int]

    def without(self, dropped: int) -> list[ChatMessage]:
        return self.messages[: self.head] + self.messages[self.starts[dropped - 1] :] if dropped else self.messages


def turns_of(messages: list[ChatMessage]) -> Turns:
    head = next((i for i, m in enumerate(messages) if m.role not in ("system", "developer")), len(messages))
    return Turns(messages, head, [i for i, m in enumerate(messages) if i > head and m.role == "user"])


async def truncated(turns: Turns, plan: Callable[[list[ChatMessage]], Awaitable[ChatPlan]], *, room: int) -> ChatPlan:
    """Drop the fewest turns to fit `room`, at most all but one."""
    best = await _fitting(turns.messages, plan, room)
    low, high = 1, len(turns.starts)
    if best is not None:
        return best
    while low < high:
        middle = (low + high) // 2
        if await _fitting(turns.without(middle), plan, room) is not None:
            high = middle
        else:
            low = middle + 1
    return await plan(turns.without(high))


async def _fitting(
    messages: list[ChatMessage], plan: Callable[[list[ChatMessage]], Awaitable[ChatPlan]], room: int
) -> ChatPlan | None:
    try:
        found = await plan(messages)
    except ApiError as error:
        if error.code != CONTEXT_EXCEEDED:
            raise
        return None
    return found if len(found.input_ids) <= room else None
