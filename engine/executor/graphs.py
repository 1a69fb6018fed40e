"""Steps as graphs, recorded once and replayed: decode by batch size, short prompts by length."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from engine.attention.backend import CapturableBackend
from engine.core.plan import Plan, PlanItem
from engine.executor.states import States
from engine.executor.step_part import Batch, Followed, Forward, FutureMap, SampledForward, StepInputs
from engine.kernels.triton.extend_plan import MAX_WHOLE
from engine.kv.step_batch import DeviceExtend, DeviceStep, PageTable, TreePaths, upload, upload_into
from engine.lora.bank import AdapterBank
from engine.models.decoder import DenseDecoder
from engine.parallel.row_exchange import RowExchange
from engine.sampler.sampler import NOT_SAMPLED, CapturableSampler
from service.process.start import no_collections

log = logging.getLogger(__name__)


class RecordedEnd(Protocol):
    """Work of a recorded decode step after its forward, by the rank that records it."""

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
        return SampledForward(hidden, recorded=logits, tokens=(tokens, bad))


class FollowedEnd:
    """End of a step on a follower. `is_last`: its stage computes columns of the logits."""

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last

    def begin(self, model: DenseDecoder, *, rows: int) -> None: ...

    def run(self, model: DenseDecoder, hidden: Tensor, slots: Tensor, output_lens: Tensor) -> Forward:
        if self._is_last:
            model.logits(hidden)
        return Forward(hidden, gave_logits=self._is_last)


WARM_UP_RUNS = 2  # compile kernels and allocate workspaces before a capture
MAX_BY_DEFAULT = 256
DRAFTED_ROWS = 512  # rows of a recorded step with drafts: split contexts take half a MiB a row

T = TypeVar("T")
Work = Callable[[], Tensor]
Computed = tuple[T, Tensor | None]  # by a recorded step, and the features that its drafter read
Replay = Callable[[Batch, int, bool], T]  # of a step, by its rows, and whether some are drafts


class Capture(Protocol):
    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """Record `work`; the result repeats it over the same memory and returns equal tensors."""


class CudaCapture:
    """torch.cuda.CUDAGraph. Graphs never overlap, so share a pool; largest first takes least.

    `stream`: of all recordings. Kernels keep its priority, and cuBLAS a workspace for each.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._pool = stream, torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        self._warm_up(work)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a transfer engine's thread may ask CUDA something meanwhile
        recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with no_collections(), recording:  # a graph that is collected meanwhile ends the capture
            out = work()

        def replay() -> T:
            graph.replay()
            return out

        return replay

    def _warm_up(self, work: Callable[[], object]) -> None:
        torch.cuda.synchronize(self._stream.device)  # weights and pool come from other streams
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                work()
        torch.cuda.synchronize(self._stream.device)


@dataclass(frozen=True, slots=True)
class RecordedTrees:
    """Rows that follow others of their step, in trees of up to `depth` rows on a path.

    `rows` gives, for the step's items and a table like int32 [size, 2 + depth], that table: place
    and path of each row, as of TreePaths.
    """

    depth: int
    rows: Callable[[Sequence[PlanItem], Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RecordedFeatures:
    """Inputs of recorded decode steps besides tokens.

    `adapters`: each size is also recorded with them. `sees`: RoPE positions of a multimodal model.
    """

    adapters: AdapterBank | None = None
    trees: RecordedTrees | None = None
    sees: bool = False


PLAIN = RecordedFeatures()


class RecordedRows(NamedTuple):
    """Rows of a recorded step, [T] int64 each. `positions`: of RoPE.

    `places`: in the requests of `slots`. `real` [1]: rows to count. `follow`: as of
    RecordedFollower.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    places: Tensor
    step: DeviceStep | DeviceExtend
    real: Tensor
    follow: Tensor


class RecordedFollower(Protocol):
    """A drafter in the graphs of steps."""

    def recorded_rows(self, items: Sequence[PlanItem], size: int) -> list[list[int]]:
        """Further inputs: lists of `size`."""

    def follow(self, model: DenseDecoder, rows: RecordedRows, hidden: Tensor) -> Tensor | None:
        """Follow known tokens with `hidden` [T, hidden]; return features [T, size], if any."""


@dataclass(frozen=True, slots=True)
class GraphRecorder:
    """Parts that record graphs.

    `states`: recurrent ones. `exchange`: with DP attention. `progress`: show a bar.
    """

    capture: Callable[[], Capture]
    backend: CapturableBackend
    page_table: PageTable
    inputs: StepInputs
    states: States | None = None
    exchange: RowExchange | None = None
    progress: bool = False
    follower: RecordedFollower | None = None

    def bar(self, sizes: Sequence[int], what: str) -> "tqdm[int]":
        return tqdm(sizes[::-1], desc=what, disable=None if self.progress else True, leave=False)

    def followed_rows(self, items: Sequence[PlanItem], size: int) -> list[list[int]]:
        return [] if self.follower is None else self.follower.recorded_rows(items, size)

    def hidden(self, model: DenseDecoder, rows: RecordedRows) -> Computed[Tensor]:
        """Compute `model` over what ids stand for, [T, hidden]."""
        if self.exchange is not None:
            self.exchange.begin_equal(len(rows.ids))
        self.backend.begin_on_device(rows.step)
        if self.states is not None:
            assert isinstance(rows.step, DeviceStep), "prompts are no graphs"
            self.states.pool.step = rows.step
        inputs = self.inputs.recorded(rows.ids)
        model.count_rows(rows.real)
        try:
            hidden = model.forward(inputs, rows.positions, self.backend.attend)
        finally:
            model.count_rows(None)
        if self.follower is None:
            return hidden, None
        return hidden, self.follower.follow(model, rows._replace(ids=inputs), hidden)

    def record(self, model: DenseDecoder, capture: Capture, work: Callable[[], Computed[T]]) -> Replay[T]:
        """Record `work`, with what drafters and rollbacks read."""

        def kept() -> dict[int, Tensor]:
            return {layer: product for states in model.states for layer, product in states.products.items()}

        replay = capture.capture(lambda: (*work(), kept()))

        def replayed(batch: Batch, rows: int, drafts: bool) -> T:
            out, features, products = replay()
            if self.follower is not None:
                batch.followed = Followed(None if features is None else features[:rows])
            if drafts:
                for states in model.states:  # a later step replays this graph before drafts are rejected
                    states.products = {layer: product.clone() for layer, product in products.items()}
            return out

        return replayed


def _checked(sizes: Sequence[int]) -> list[int]:
    assert sizes and list(sizes) == sorted(set(sizes)) and sizes[0] >= 1, sizes
    return list(sizes)


class DecodeGraphs:
    """Decode steps by batch size, ascending `sizes`; a batch takes the next one.

    Padded rows are token 0 at position 0 of the scratch row, write to page 0 and are not sampled.
    Lengths follow from positions on the device. With grammar masks rows are sampled after the
    graph.

    Ranks record the same sizes in the same order, with the sums of a step. With DP attention all
    replay the size of the largest.
    """

    def __init__(
        self, sizes: Sequence[int], recorder: GraphRecorder, *, end: RecordedEnd, features: RecordedFeatures = PLAIN
    ) -> None:
        self.sizes, self._recorder, self._end = _checked(sizes), recorder, end
        self._page_table, device = recorder.page_table, recorder.page_table.device
        self._adapters, self._tree, self._sees = features.adapters, features.trees, features.sees
        self._inputs = {size: upload(self._rows([], size, samples=False), device) for size in sizes}
        no_tree = torch.tensor(
            [[0, 1] + [0] * (self._tree.depth if self._tree else 0)], dtype=torch.int32, device=device
        )
        self._trees = {size: no_tree.repeat(size, 1) for size in sizes} if self._tree else {}
        self._graphs: dict[int, Replay[Forward]] = {}
        self._adapted: dict[int, Replay[Forward]] = {}

    def forget(self) -> None:
        self._graphs, self._adapted = {}, {}

    def record(self, model: DenseDecoder) -> None:
        """Record every size in stream order with nothing in flight.

        Raises torch.OutOfMemoryError and leaves no graphs.
        """
        self.forget()
        if any(states.gpu is None for states in model.states):
            log.warning("no graphs: recurrent layers have kernels of their own on GPUs alone, by Triton")
            return
        self._end.begin(model, rows=self.sizes[-1])
        capture = self._recorder.capture()
        graphs, adapted = {}, {}
        for size in self._recorder.bar(self.sizes, "decode graphs"):
            padding = self._rows([], size, samples=False)
            upload_into(self._inputs[size], padding)  # warm-ups would compute, and count, the last step again
            graphs[size] = self._recorder.record(model, capture, self._work(model, size))
            if self._adapters is not None:
                self._adapters.begin_recording(size)
                adapted[size] = self._recorder.record(model, capture, self._work(model, size))
                self._adapters.rest()
        self._graphs, self._adapted = graphs, adapted

    def takes(self, num_rows: int) -> bool:
        return bool(self._graphs) and num_rows <= self.sizes[-1]

    def size_of(self, num_rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def run(self, batch: Batch) -> Forward | None:
        """Compute a step, sampled unless it has masks; valid until the next. Marks no layer."""
        plan = batch.plan
        if not batch.recorded or not self.takes(batch.most) or batch.layers.watched:
            return None
        if batch.adapted and self._adapters is None:
            return None
        size, samples = self.size_of(batch.most), not plan.masks and not plan.sample_deferred
        if self._adapters is not None:
            self._adapters.compute(recorded=size)
        batch.hold_all()
        self._recorder.inputs.fill(len(plan.items))
        upload_into(self._inputs[size], self._rows(plan.items, size, samples=samples))
        if self._tree is not None:
            upload_into(self._trees[size], self._tree.rows(plan.items, self._trees[size]))
        drafts = self._recorder.states is not None and self._recorder.states.checkpoint(plan.items)
        replay = (self._adapted if batch.adapted else self._graphs)[size]
        return replay(batch, len(plan.items), drafts).rows(len(plan.items), sampled=samples)

    def _rows(self, items: list[PlanItem], size: int, *, samples: bool) -> Tensor:
        """Host int64[n, size]: ids, positions, slots, lengths, count, RoPE, drafter, states."""
        assert all(item.sample for item in items), "a decode step samples every request"
        more = size - len(items)
        ids = [item.tokens[0] for item in items] + [0] * more
        positions = [item.start for item in items] + [0] * more
        slots = [item.slot for item in items] + [self._page_table.scratch_slot] * more
        lens = [item.output_len if samples else NOT_SAMPLED for item in items] + [NOT_SAMPLED] * more
        turns = (
            [[item.start + (item.images.rope_delta if item.images else 0) for item in items] + [0] * more]
            if self._sees
            else []
        )
        states = self._recorder.states.recorded_rows(items, size) if self._recorder.states is not None else []
        follow = self._recorder.followed_rows(items, size)
        return torch.tensor([ids, positions, slots, lens, [len(items)] * size, *turns, *follow, *states])

    def _work(self, model: DenseDecoder, size: int) -> Callable[[], Computed[Forward]]:
        ids, positions, slots, output_lens, real, *more = self._inputs[size]
        trees = self._trees.get(size)
        at = 5 + self._sees
        follow = self._inputs[size][at : at + len(self._recorder.followed_rows([], size))]

        def work() -> Computed[Forward]:
            places = positions if trees is None else trees[:, 0].to(torch.int64)
            pages, offsets = self._page_table.locate(slots, places)
            step = DeviceStep(
                page_table=self._page_table.rows,
                slots=slots,
                kv_lens=(positions + 1).to(torch.int32),
                token_pages=pages,
                token_offsets=offsets,
                paths=None
                if trees is None
                else TreePaths(starts=trees[:, 1].contiguous(), places=trees[:, 2:].contiguous()),
                state_rows=self._inputs[size][-3:] if self._recorder.states is not None else None,
                windows=self._page_table.window_rows(slots, places),
            )
            turned = more[0] if self._sees else positions
            rows = RecordedRows(ids, turned, slots, positions, step, real[:1], follow)
            hidden, features = self._recorder.hidden(model, rows)
            return self._end.run(model, hidden, slots, output_lens), features

        return work


def graph_sizes(*, sizes: Sequence[int], max_bs: int | None, max_running: int, rows: int = 1) -> list[int]:
    """Choose ascending sizes, up to the first that holds `max_running` requests of `rows`.

    Default: 1, 2, 4, then at most 7 wasted rows up to 64, 31 to 256, 63 beyond.
    """
    if sizes:
        wanted, running = sorted(set(sizes)), max_running * rows
    else:
        most = min(max_bs or MAX_BY_DEFAULT, max_running)
        most = running = max(most, min(most * rows, DRAFTED_ROWS))
        wanted = [1, 2, 4, *range(8, 65, 8), *range(96, 257, 32), *range(320, most + 1, 64)]
        wanted = [size for size in wanted if size < most] + [most]
    needed = [size for size in wanted if size < running]
    return needed + [size for size in wanted if size >= running][:1]


MAX_REQUESTS = 16  # of a recorded step: attention starts programs for each, also for one that is padding


class PrefillGraphs:
    """Short prompt steps by number of new tokens, ascending `sizes`.

    For some hundred tokens launches take longer than the GPU. A step takes the graph of the next
    size. Long prefixes, prompts from their first image on, and draft trees are left to kernels that
    the host cuts.
    """

    def __init__(self, sizes: Sequence[int], recorder: GraphRecorder) -> None:
        self.sizes, self._recorder, self._page_table = _checked(sizes), recorder, recorder.page_table
        self._inputs = {size: self._rows([], size).to(self._page_table.device) for size in sizes}
        self._graphs: dict[int, Replay[Tensor]] = {}

    def forget(self) -> None:
        self._graphs = {}

    def record(self, model: DenseDecoder) -> None:
        """See DecodeGraphs.record."""
        self.forget()
        capture = self._recorder.capture()
        bar = self._recorder.bar(self.sizes, "prefill graphs")
        graphs = {}
        for size in bar:
            upload_into(self._inputs[size], self._rows([], size))  # recording counts no row
            graphs[size] = self._recorder.record(model, capture, self._work(model, size))
        self._graphs = graphs

    def takes(self, plan: Plan) -> bool:
        items = plan.items
        if not self._graphs or not plan.extend or len(items) > MAX_REQUESTS:
            return False
        is_short = all(item.kv_len <= MAX_WHOLE for item in items)
        if any(item.images is not None or item.place >= 0 for item in items):
            return False
        return is_short and sum(item.q_len for item in items) <= self.sizes[-1]

    def run(self, batch: Batch) -> Forward | None:
        """Compute hidden states [T, hidden], valid until the next step; never with adapters."""
        if batch.adapted or not self.takes(batch.plan):
            return None
        batch.hold_all()
        return Forward(batch.layers.whole(batch.plan.seq, lambda: self._replayed(batch)))

    def _replayed(self, batch: Batch) -> Tensor:
        items = batch.items
        num_tokens = sum(item.q_len for item in items)
        size = self.sizes[bisect_left(self.sizes, num_tokens)]
        self._recorder.inputs.fill(num_tokens)
        upload_into(self._inputs[size], self._rows(items, size))
        return self._graphs[size](batch, num_tokens, False)[:num_tokens]

    def _rows(self, items: list[PlanItem], size: int) -> Tensor:
        """Return a graph's input on the host: int64 [n * size + 3 * MAX_REQUESTS + 1] (`_work`)."""
        scratch = self._page_table.scratch_slot
        more, more_requests = size - sum(item.q_len for item in items), MAX_REQUESTS - len(items)
        ids = [token for item in items for token in item.tokens] + [0] * more
        positions = [at for item in items for at in range(item.start, item.kv_len)] + [0] * more
        token_slots = [item.slot for item in items for _ in range(item.q_len)] + [scratch] * more
        slots = [item.slot for item in items] + [scratch] * more_requests
        kv_lens = [item.kv_len for item in items] + [0] * more_requests
        starts = list(accumulate((item.q_len for item in items), initial=0))
        starts += [starts[-1]] * more_requests
        follow = [x for row in self._recorder.followed_rows(items, size) for x in row]
        return torch.tensor([*ids, *positions, *token_slots, *slots, *kv_lens, *starts, *follow])

    def _work(self, model: DenseDecoder, size: int) -> Callable[[], Computed[Tensor]]:
        counts = [size, size, size, MAX_REQUESTS, MAX_REQUESTS, MAX_REQUESTS + 1]
        counts.append(len(self._inputs[size]) - sum(counts))
        ids, positions, token_slots, slots, kv_lens, starts, follow = self._inputs[size].split(counts)
        follow = follow.view(-1, size)

        def work() -> Computed[Tensor]:
            pages, offsets = self._page_table.locate(token_slots, positions)
            step = DeviceExtend(
                page_table=self._page_table.rows,
                slots=slots,
                starts=starts.to(torch.int32),
                kv_lens=kv_lens.to(torch.int32),
                token_pages=pages,
                token_offsets=offsets,
                windows=self._page_table.window_rows(token_slots, positions),
            )
            rows = RecordedRows(ids, positions, token_slots, positions, step, starts[-1:], follow)
            return self._recorder.hidden(model, rows)

        return work
