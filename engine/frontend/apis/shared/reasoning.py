"""Reasoning that the engine tracks for a constraint or a budget."""

from engine.frontend.services import Services
from engine.sampling_params import ReasoningGate
from engine.text.reasoning import Opening, ReasoningFormat
from service.http.errors import bad_field


def needed_format(s: Services, *, field: str) -> ReasoningFormat:
    """Raises ApiError(400) without one."""
    format = s.model.reasoning
    if format is None:
        raise bad_field(field, "this server was started without --reasoning-parser", code="unsupported_parameter")
    return format


def check_budget(s: Services, budget: int | None, *, field: str) -> None:
    """Raises ApiError(400)."""
    if budget is None:
        return
    format, tokenizer = needed_format(s, field=field), s.model.tokenizer
    if budget < 0:
        raise bad_field(field, f"must be at least 0, got {budget}")
    ids = tokenizer.encode(format.way_out, add_special_tokens=False)
    if format.before_answer not in tokenizer.decode(ids, skip_special_tokens=False):
        raise bad_field(
            field,
            f"this model's tokenizer cannot write {format.way_out!r}; start the server with another --reasoning-parser",
        )


def gate_of(
    format: ReasoningFormat, opening: Opening, *, budget: int | None, is_constrained: bool
) -> ReasoningGate | None:
    """None if the engine need not track it."""
    if opening is Opening.CLOSED or not (is_constrained or budget is not None):
        return None
    if format.answer:  # the answer's marker always comes
        opening = Opening.OPEN
    return ReasoningGate(
        start=format.start, end=format.before_answer, forced=format.way_out, opening=opening.value, budget=budget
    )
