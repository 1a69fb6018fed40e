"""Allowed tokens of a step's rows, from the grammars of requests."""

from engine.core.plan import Plan, PlanItem
from engine.core.request import Grammar
from engine.core.stages import Stages


class GrammarMasks:
    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def awaits_token(self, items: list[PlanItem]) -> bool:
        """Check if the mask of an item depends on a token in flight."""
        live = self._stages.live
        for item in items:
            request = live[item.rid]
            if item.sample and request.grammar is not None and request.pending - request.drafts.rows > 1:
                return True
        return False

    def fill(self, plan: Plan) -> None:
        """Set the allowed tokens of `plan`, just before its sampling is launched."""
        live = self._stages.live
        grammar: Grammar | None = None
        for i, item in enumerate(plan.items):
            request = live[item.rid]
            if not item.sample or request.grammar is None or request.finish is not None:
                continue
            if item.draft:
                grammar = (grammar or request.grammar).fork()
                grammar.accept(item.tokens[0])
                plan.masks[i] = grammar.bitmask()
                continue
            grammar, known = None, len(request.output_ids)
            assert item.output_len == known, f"{request.rid}: a mask before the token it follows from"
            plan.masks[i] = request.grammar.bitmask()
