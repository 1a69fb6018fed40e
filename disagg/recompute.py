"""A recompute request of a decode worker (disagg/resumption.py), as a request of the prefill worker's engine. Pure."""

from dataclasses import dataclass

from engine.core.request import Request
from engine.sampling_params import SamplingParams
from transfer_backends.contract import RecomputeRequest, Work

NOTHING = SamplingParams(temperature=0.0, max_new_tokens=0)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Token ids are below `vocab_size`, and a sequence has at most `context_length` of them."""

    vocab_size: int
    context_length: int


def why_not(work: Work, bounds: Bounds) -> str | None:
    """Return why this engine cannot compute the work, or None."""
    if len(work.tokens) > bounds.context_length:
        return f"{len(work.tokens)} tokens exceed the context of {bounds.context_length}"
    if not (work.tokens and min(work.tokens) >= 0 and max(work.tokens) < bounds.vocab_size):
        return f"token ids must be between 0 and {bounds.vocab_size - 1}"
    return None


def request_for(wanted: RecomputeRequest, now_s: float) -> Request:
    """The request ends when its KV is computed; the sample of its last step is dropped."""
    return Request(
        rid=f"recompute-{wanted.room}-{wanted.room_attempt}",
        input_ids=list(wanted.work.tokens),
        sampling=NOTHING,
        eos_ids=frozenset(),
        arrived_s=now_s,
        prefill_only=True,
        priority=wanted.work.priority,
        keep_kv=wanted.work.share,
        namespace=wanted.work.namespace,
    )
