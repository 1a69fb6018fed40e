"""What a recorded decode step computes behind its forward: that depends on which rank records it."""

from typing import Protocol

import torch
from torch import Tensor

from engine.executor.future_map import FutureMap
from engine.executor.step_part import Forward
from engine.models.decoder import DenseDecoder
from engine.sampler.make import CapturableSampler


class RecordedEnd(Protocol):
    def begin(self, model: DenseDecoder, *, rows: int) -> None:
        """Prepare a recording of steps of at most `rows` rows."""

    def run(self, model: DenseDecoder, hidden: Tensor, slots: Tensor, output_lens: Tensor) -> Forward:
        """Compute the rest of a step from its hidden states [T, hidden]."""


class SampledEnd:
    """Logits and tokens, which go into the future map: of the rank that samples."""

    def __init__(self, sampler: CapturableSampler, future_map: FutureMap, *, device: torch.device) -> None:
        self._sampler = sampler
        self._future_map = future_map
        self._logits = torch.empty((0, 0), device=device)

    def begin(self, model: DenseDecoder, *, rows: int) -> None:
        # One for all graphs: what a graph returns stays taken beside what the others return.
        self._logits = torch.empty((rows, model.vocab_size), dtype=torch.float32, device=self._logits.device)

    def run(self, model: DenseDecoder, hidden: Tensor, slots: Tensor, output_lens: Tensor) -> Forward:
        logits = model.logits(hidden, out=self._logits[: len(hidden)])
        tokens, bad = self._sampler.sample_on_device(logits, slots, output_lens)
        self._future_map.store(slots, tokens)  # 0 for a row that is sampled behind the graph
        return Forward(hidden, logits, tokens, bad)


class FollowedEnd:
    """The end of a step on a rank that samples nothing. `is_last`: its stage has the head, of which it gives its columns to the leader."""

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last

    def begin(self, model: DenseDecoder, *, rows: int) -> None:
        """Keep nothing."""

    def run(self, model: DenseDecoder, hidden: Tensor, slots: Tensor, output_lens: Tensor) -> Forward:
        if self._is_last:
            model.logits(hidden)
        return Forward(hidden, gave_logits=self._is_last)
