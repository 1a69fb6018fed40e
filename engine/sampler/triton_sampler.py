"""GPU sampler with slot parameters in a device table, for captured steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.plan import SlotOpen
from engine.kernels.triton import sample as triton_sample
from engine.kernels.triton.sample import RowMasks
from engine.kv.page_checksum import signed
from engine.kv.step_batch import upload, upload_into
from engine.sampler.sampler import end_ids, log_min_p_of, seed_of, top_k_of
from engine.sampler.sampling import TokenMask


class TritonSampler:
    """`Sampler` in Triton with equal tokens (kernels/triton/sample.py); row `num_slots` pads."""

    def __init__(self, *, num_slots: int, vocab_size: int, device: str | torch.device) -> None:
        assert vocab_size <= triton_sample.MOST_TOKENS, vocab_size
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._requests = torch.zeros((num_slots + 1, triton_sample.COLUMNS), dtype=torch.int64, device=self._device)
        self._slots: dict[int, SlotOpen] = {}
        self._memory: dict[int, tuple[Tensor | None, Tensor | None]] = {}  # memory with addresses in the table

    def open(self, slot: SlotOpen) -> None:
        assert slot.slot not in self._slots, f"slot {slot.slot} is open"
        self._slots[slot.slot] = slot
        seen = self._seen(slot) if slot.sampling.penalized else None
        edits = self._edits(slot)
        self._memory[slot.slot] = seen, edits
        upload_into(self._requests[slot.slot], self._row(slot, seen, edits))

    def close(self, slot: int) -> None:
        del self._slots[slot], self._memory[slot]  # its next owner writes after the steps in flight

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        output_lens: Sequence[int],
        *,
        mask: TokenMask | None = None,
        drafts: Sequence[int | None] = (),
    ) -> tuple[Tensor, Tensor]:
        """Slots with drafts have no penalties, since the kernel counts."""
        assert logits.shape == (len(slots), self._vocab_size), (logits.shape, len(slots), self._vocab_size)
        inputs = upload([list(slots), list(output_lens)], self._device)
        masks = None if mask is None else self._masks(mask, slots, output_lens)
        return triton_sample.sample(logits, inputs[0], inputs[1], self._requests, masks)

    def guess(self, logits: Tensor, slots: Sequence[int], output_lens: Sequence[int]) -> Tensor:
        return self.sample(logits, slots, output_lens)[0]

    def sample_on_device(self, logits: Tensor, slots: Tensor, output_lens: Tensor) -> tuple[Tensor, Tensor]:
        return triton_sample.sample(logits, slots, output_lens, self._requests, None)

    def _masks(self, mask: TokenMask, slots: Sequence[int], output_lens: Sequence[int]) -> RowMasks:
        rows = torch.full((len(slots),), -1, dtype=torch.int32, device=self._device)
        order = torch.arange(len(mask.rows), dtype=torch.int32, device=self._device)
        params = [self._slots[s].sampling for s in slots]
        bans = any(n < p.min_new_tokens for n, p in zip(output_lens, params, strict=True))
        return RowMasks(rows=rows.index_copy_(0, mask.rows, order), bits=mask.bits, bans=bans)

    def _row(self, slot: SlotOpen, seen: Tensor | None, edits: Tensor | None) -> Tensor:
        p = slot.sampling
        num_ends = len(end_ids(slot)) if p.min_new_tokens > 0 else 0
        addresses = [0 if x is None else x.data_ptr() for x in (seen, edits)]
        numbers = [0 if p.greedy else signed(seed_of(slot) % 2**64), top_k_of(p, self._vocab_size), *addresses]
        numbers += [len(p.logit_bias), num_ends, p.min_new_tokens, 0]
        temperature = 0.0 if p.greedy else p.temperature
        floats = [temperature, p.top_p, log_min_p_of(p)]
        floats += [p.repetition_penalty, p.frequency_penalty, p.presence_penalty, 0.0, 0.0]
        return torch.cat([torch.tensor(numbers), torch.tensor(floats, dtype=torch.float32).view(torch.int64)])

    def _seen(self, slot: SlotOpen) -> Tensor:
        """int32[V]: 1 for tokens seen, plus 2 per generation."""
        prompt, output = (
            upload(torch.tensor(ids, dtype=torch.int64), self._device) for ids in (slot.prompt_ids, slot.output_ids)
        )
        words = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
        words.index_fill_(0, prompt, 1).index_fill_(0, output, 1)
        return words.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))

    def _edits(self, slot: SlotOpen) -> Tensor | None:
        """int32[n, 2] of token ids and added float bits: biases, then -inf for banned ends."""
        p = slot.sampling
        ends = end_ids(slot) if p.min_new_tokens > 0 else ()
        if not p.logit_bias and not ends:
            return None
        ids = torch.tensor([*p.logit_bias, *ends], dtype=torch.int32)
        values = torch.tensor([*p.logit_bias.values(), *(-torch.inf for _ in ends)], dtype=torch.float32)
        return upload(torch.stack([ids, values.view(torch.int32)], 1), self._device)
