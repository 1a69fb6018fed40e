"""How an API shows the samples of a request. Pure."""

from typing import Any, Protocol

from engine.text.sample import TextOutput

LOWEST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI's own stand-in


class View(Protocol):
    """Shapes of one API's answers. Chunks come in order; `last` follows the last one."""

    def body(self, answers: list[TextOutput]) -> Any: ...
    def chunks(self, index: int, output: TextOutput) -> list[Any]: ...
    def last(self) -> list[Any]: ...


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)
