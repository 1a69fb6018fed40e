"""Short prompts as graphs: recorded once for each number of tokens, replayed with one launch.

Launching the kernels of a forward one by one takes the host longer than a GPU takes to compute a few hundred tokens. A step takes
the graph of the next size: its padded tokens belong to no request and write to page 0, its padded requests have no tokens.
Long prefixes are left to kernels that the host cuts by their length, and so are prompts with images from the first one on.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from tqdm import tqdm

from engine.attention.backend import CapturableBackend
from engine.core.plan import Plan, PlanItem
from engine.executor.decode_graphs import Capture, Work
from engine.executor.future_map import StepInputs
from engine.executor.step_part import Batch, Forward
from engine.kernels.extend_plan import MOST_WHOLE
from engine.kv.page_table import PageTable
from engine.kv.step_batch import DeviceExtend
from engine.kv.upload import upload_into
from engine.models.decoder import DenseDecoder

MOST_REQUESTS = 16  # of a recorded step: attention starts programs for each, also for one that is padding


class PrefillGraphs:
    """`sizes`: numbers of new tokens to record, ascending."""

    def __init__(
        self,
        *,
        sizes: Sequence[int],
        capture: Callable[[], Capture],
        backend: CapturableBackend,
        page_table: PageTable,
        inputs: StepInputs,
        progress: bool = False,
    ) -> None:
        assert sizes and list(sizes) == sorted(set(sizes)) and sizes[0] >= 1, sizes
        self.sizes = list(sizes)
        self._capture = capture
        self._backend = backend
        self._page_table = page_table
        self._step_inputs = inputs
        self._progress = progress
        self._inputs = {size: self._rows([], size).to(page_table.device) for size in sizes}
        self._graphs: dict[int, Work] = {}

    def forget(self) -> None:
        """Drop all graphs until `record`."""
        self._graphs = {}

    def record(self, model: DenseDecoder) -> None:
        """Record every size for `model`, in stream order with nothing in flight.

        Raises torch.OutOfMemoryError, and then there are no graphs.
        """
        self.forget()
        capture = self._capture()
        bar = tqdm(self.sizes[::-1], desc="prefill graphs", disable=None if self._progress else True, leave=False)
        self._graphs = {size: capture.capture(self._work(model, size)) for size in bar}

    def takes(self, plan: Plan) -> bool:
        items = plan.items
        if not self._graphs or not plan.extend or len(items) > MOST_REQUESTS:
            return False
        is_short = all(item.kv_len <= MOST_WHOLE for item in items)
        if any(item.images is not None for item in items):
            return False
        return is_short and sum(item.q_len for item in items) <= self.sizes[-1]

    def run(self, batch: Batch) -> Forward | None:
        """Compute the hidden states [T, hidden] of the new tokens; valid until the next step begins. They know no adapters."""
        if batch.adapted or not self.takes(batch.plan):
            return None
        batch.arrival.hold_all()
        return Forward(batch.layers.whole(batch.plan.seq, lambda: self._replayed(batch.items)))

    def _replayed(self, items: list[PlanItem]) -> Tensor:
        num_tokens = sum(item.q_len for item in items)
        size = self.sizes[bisect_left(self.sizes, num_tokens)]
        self._step_inputs.fill(num_tokens)
        upload_into(self._inputs[size], self._rows(items, size))
        return self._graphs[size]()[:num_tokens]

    def _rows(self, items: list[PlanItem], size: int) -> Tensor:
        """Return the input of a graph, on the host: [3 * size + 3 * MOST_REQUESTS + 1] int64, see `_work`."""
        scratch = self._page_table.scratch_slot
        more, more_requests = size - sum(item.q_len for item in items), MOST_REQUESTS - len(items)
        ids = [token for item in items for token in item.tokens] + [0] * more
        positions = [at for item in items for at in range(item.start, item.kv_len)] + [0] * more
        token_slots = [item.slot for item in items for _ in range(item.q_len)] + [scratch] * more
        slots = [item.slot for item in items] + [scratch] * more_requests
        kv_lens = [item.kv_len for item in items] + [0] * more_requests
        starts = list(accumulate((item.q_len for item in items), initial=0))
        starts += [starts[-1]] * more_requests
        return torch.tensor([*ids, *positions, *token_slots, *slots, *kv_lens, *starts])

    def _work(self, model: DenseDecoder, size: int) -> Work:
        counts = [size, size, size, MOST_REQUESTS, MOST_REQUESTS, MOST_REQUESTS + 1]
        ids, positions, token_slots, slots, kv_lens, starts = self._inputs[size].split(counts)

        def work() -> Tensor:
            pages, offsets = self._page_table.locate(token_slots, positions)
            step = DeviceExtend(
                page_table=self._page_table.rows,
                slots=slots,
                starts=starts.to(torch.int32),
                kv_lens=kv_lens.to(torch.int32),
                token_pages=pages,
                token_offsets=offsets,
            )
            self._backend.begin_on_device(step)
            return model.forward(self._step_inputs.recorded(ids), positions, self._backend.attend)

        return work


def prefill_graph_sizes(most: int) -> list[int]:
    """Choose the numbers of tokens to record: 16, 32, 64, then every 64 up to `most`."""
    return sorted({size for size in (16, 32, *range(64, most, 64)) if size < most} | {most})
