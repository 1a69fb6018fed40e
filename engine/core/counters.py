"""Counters of a scheduler."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since start; they only grow."""

    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    retractions: int = 0
    out_of_memory: int = 0  # of them, those of a running request whose memory others needed to grow
    out_of_memory_tokens: int = 0  # whose KV these gave up
    preemptions: int = 0
    resumed_computed: int = 0  # retracted requests whose KV this engine computed again
    resumed_restored: int = 0  # ... came back from the host
    steps: int = 0
    prefill_steps: int = 0  # of them, those with a part of a prompt
    mixed_steps: int = 0  # of these, those in which decodes rode along
    wasted_samples: int = 0  # of requests that had ended
    deferred_samples: int = 0  # steps whose sampling waited for masks
