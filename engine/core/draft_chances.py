"""Acceptance probabilities of draft tokens, learned from earlier drafts."""

from bisect import bisect
from itertools import accumulate, repeat
from operator import mul

from engine.core.drafts import FORCED, MODELED, Chance, Draft, Drafts
from engine.core.request import Request

MATCHES = (3, 4, 6, 9, 17, MODELED, FORCED)  # first length of each class of matches but the shortest
FIRST_CHANCES = (0.4, 0.55, 0.7, 0.8, 0.87, 0.92, 0.7, 0.98)  # by class
CONFIDENCES = (
    0.02,
    0.05,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    0.95,
    0.98,
    0.995,
)  # the same for a drafter's confidences
FIRST_OF_CONFIDENCE = (0.01, *CONFIDENCES)
FIRST_OF_OTHERS = 0.4
TRUST = 8.0  # draft tokens that weigh as much as FIRST_CHANCES
TRUST_OF_CLASS = 4.0  # weight of the class in a request's estimate
KEPT, KEPT_OF_REQUEST = 0.998, 0.95  # decay per draft token
NEVER, SURE = 0.01, 0.99


class Chances:
    def __init__(self) -> None:
        self._of_match = [Chance() for _ in FIRST_CHANCES]
        self._of_others = Chance()  # later candidates of a tree node, if the first is wrong
        self._of_confidence = {is_greedy: [Chance() for _ in FIRST_OF_CONFIDENCE] for is_greedy in (False, True)}

    def of_place(self, drafts: Drafts, topk: int) -> float:
        first = self.of_match(drafts, MODELED)
        return first if topk == 1 else min(SURE, first + (1 - first) * self._of_others.value(FIRST_OF_OTHERS, TRUST))

    def of_match(self, drafts: Drafts, match: int) -> float:
        """Probability of a token after such a match."""
        kind = bisect(MATCHES, match)
        of_class = self._of_match[kind].value(FIRST_CHANCES[kind], TRUST)
        return min(SURE, max(NEVER, drafts.chance.value(of_class, TRUST_OF_CLASS)))

    def of_tokens(self, request: Request, draft: Draft) -> list[float]:
        """Probability of each token with all before it."""
        if not draft.confidences:
            return list(accumulate(repeat(self.of_match(request.drafts, draft.match), len(draft.tokens)), mul))
        chances: list[float] = []
        for i, confidence in enumerate(draft.confidences):
            parent = draft.parents[i]
            chances.append(self._trusted(request, confidence) * (1.0 if parent < 0 else chances[parent]))
        return chances

    def score(self, request: Request) -> None:
        drafts, at = request.drafts, -1
        draft, of_match = drafts.draft, self._of_match[bisect(MATCHES, drafts.draft.match)]
        for token in request.tokens(drafts.known, request.num_tokens):
            guesses = draft.children(at)
            if not guesses:
                return
            at = next((i for i in guesses if draft.tokens[i] == token), -1)
            of_match.note(hit=at == guesses[0], kept=KEPT)
            drafts.chance.note(hit=at == guesses[0], kept=KEPT_OF_REQUEST)
            if len(guesses) > 1 and at != guesses[0]:
                self._of_others.note(hit=at >= 0, kept=KEPT)
            if draft.confidences:
                for i in guesses:
                    self._class_of(request, draft.confidences[i])[1].note(hit=i == at, kept=KEPT)
            if at < 0:
                return

    def _trusted(self, request: Request, confidence: float) -> float:
        first, chance = self._class_of(request, confidence)
        return min(SURE, chance.value(first, TRUST))

    def _class_of(self, request: Request, confidence: float) -> tuple[float, Chance]:
        """Return prior and record; samples have their own, since noise changes them."""
        kind = bisect(CONFIDENCES, confidence)
        return FIRST_OF_CONFIDENCE[kind], self._of_confidence[request.sampling.greedy][kind]
