"""Recurrent state slots: one per running request, and snapshots at prefix tree nodes.

  FREE --open, adopt--> HELD by a request  --free-->                       FREE
  FREE --snapshot---->  HELD, on its way   --keep--> CACHED at a node --evict, drop--> FREE

Prefixes are usable up to a node with a snapshot. Prefill chunks end, and copy their state, at
multiples of `grid`, where rounding does not depend on chunks. An answer keeps its last snapshot at
a multiple of `every`, for the next turn.

Copies run in plan order, so a slot may change owner once its copy is planned, without locks. Peers
write outside that order: there a snapshot stays while its node is read.

Verify steps pass a state over all draft rows. After a rejection the next plan rolls it back first;
until that is collected the slot stays. Rows never cross a multiple of `every`, so a snapshot covers
all of them or is dropped.

After SGLang's MambaRadixCache; snapshots at branch points are Marconi's (arXiv:2411.19379).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import lcm

from engine.core.mem_cache.memory_part import LowerTier, MemoryPart, StepEnds
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.mem_cache.radix_cache import Branch, Match, Node, RadixCache, TreePart
from engine.core.memory import Memory
from engine.core.plan import Plan, StateCopy, StateRollback
from engine.core.request import Request

CHUNK = 64  # tokens per piece of recurrent layers: other cuts round differently
EVERY = 256  # answer tokens between snapshots


class StateSlots(MemoryPart, TreePart, StepEnds):
    """`grid`: tokens, a multiple of the page. Without `keeps_snapshots` nothing is reused.

    `num_shadows`: requests that may verify drafts in a step; the executor keeps their old states.
    """

    name = "state slots"
    one_verify_step = True  # rollbacks handle one unverified step

    def __init__(
        self,
        *,
        num_slots: int,
        grid: int,
        every: int | None = None,
        keeps_snapshots: bool = True,
        peers_write: bool = False,
        num_shadows: int = 0,
    ) -> None:
        self.tier = LowerTier()
        self.allocator = PageAllocator(num_pages=num_slots, page_size=1)
        self.allocators = (self.allocator,)
        self.grid = grid
        self.keeps_snapshots = keeps_snapshots
        self._every = lcm(EVERY, grid) if every is None else every
        self._peers_write = peers_write
        self.max_drafted = num_shadows
        self.num_snapshots = 0  # kept since start
        self.on_change: Callable[[Node], None] = lambda node: None  # a node's snapshot came or went
        self._nodes: OrderedDict[int, Node] = OrderedDict()  # by snapshot slot, least recently used first
        self._begins: list[StateCopy] = []  # since the last plan
        self._snapshots: list[StateCopy] = []
        self._rewinds: dict[int, Request] = {}  # since the last plan, by slot
        self._rewinding: dict[int, list[Request]] = {}  # by the plan that does it

    @property
    def num_available(self) -> int:
        return self.allocator.num_free + sum(map(self._may_go, self._nodes.values()))

    # ---- requests

    def fits(self, request: Request, *, without: Sequence[Request] = ()) -> bool:
        return self.num_available > 0 or any(r.recurrent.slot for r in without)

    def open(self, request: Request, match: Match, *, lands: bool) -> None:
        if lands:
            self.adopt(request)
        elif (kept := self.tier.take_state()) is not None:
            self.adopt(request)
            self._begins.append(StateCopy(kept, request.recurrent.slot, from_host=True))
        else:
            self.begin(request, source=match.state)

    def start(self, request: Request, match: Match, *, lands: bool) -> None:
        if not lands and self._keeps(request):
            self.aim(request, start=request.computed_len, cached=match.num_cached)

    def begin(self, request: Request, *, source: int) -> None:
        """Copy snapshot `source` into a slot for `request`; 0: the initial state."""
        slot = self._take()
        if slot != source:  # else the snapshot itself was evicted for it
            self._begins.append(StateCopy(source or None, slot))
        request.recurrent.slot = slot

    def adopt(self, request: Request) -> None:
        """Allocate a slot whose content arrives from elsewhere, so it must not be zeroed."""
        request.recurrent.slot = self._take()

    def free(self, request: Request) -> None:
        assert not request.recurrent.snapshots, f"{request.rid}: a snapshot is on its way"
        self._rewinds.pop(request.recurrent.slot, None)
        if (answer := request.recurrent.answer) is not None and answer.state:
            self.tier.on_state(answer, evicted=False)
        if request.recurrent.slot:
            self.allocator.free([request.recurrent.slot])
        request.recurrent.slot = 0

    def detach(self, request: Request) -> Sequence[tuple[PageAllocator, list[int]]]:
        slots = [request.recurrent.slot] if request.recurrent.slot else []
        self.allocator.quarantine(slots)
        request.recurrent.slot = 0
        return [(self.allocator, slots)]

    def aim(self, request: Request, *, start: int, cached: int) -> None:
        """Choose snapshots of `request` after `start`: at its last chunk, and where prompts branch.

        `cached`: leading tokens with pages in the tree.
        """
        last = (request.num_tokens - 1) // self.grid * self.grid
        parting = min(cached // self.grid * self.grid, last)
        request.recurrent.snapshots_at = tuple(sorted({at for at in (parting, last) if at > start}))

    def tail(self, request: Request, num_tokens: int) -> tuple[list[int], ...]:
        return ([request.recurrent.slot or request.recurrent.pinned],)

    # ---- ends of steps

    def cut(self, request: Request, start: int, end: int) -> int:
        return next((at for at in request.recurrent.snapshots_at if start < at < end), end)

    def extend(self, request: Request, end: int, *, answer: bool) -> None:
        """Take a reusable snapshot of the planned step's state, if there is room."""
        planned, at_every = request.recurrent.snapshots_at, end % self._every == 0
        reusable = at_every and self._keeps(request) if answer else end in planned
        if reusable and self.num_available:
            self._copy(request, end)

    def cut_answer(self, request: Request, start: int, end: int) -> int:
        return min(end, (start // self._every + 1) * self._every) if self._keeps(request) else end

    def _keeps(self, request: Request) -> bool:
        return self.keeps_snapshots and request.keep_kv

    def keep(self, request: Request, at: int, memory: Memory) -> None:
        if (slot := request.recurrent.snapshots.pop(at, 0)) == 0:
            return
        above = request.recurrent.answer if at > len(request.input_ids) else None
        memory.share(request)
        shared = request.shared_pages * memory.allocator.page_size == at == request.computed_len
        if shared and request.keep_kv and not request.ended and request.lock is not None:
            self.keep_at(slot, request.lock, above=above)
            request.recurrent.answer = request.lock if at > len(request.input_ids) else None
            if request.recurrent.answer is None:  # else at the end, for the last one
                self.tier.on_state(request.lock, evicted=False)
        else:
            self.drop(slot)

    def lend(self, request: Request, match: Match) -> bool:
        request.recurrent.pinned = match.state
        return True

    def keep_landed(self, request: Request) -> None:
        slot, request.recurrent.slot = request.recurrent.slot, 0
        shared = request.shared_pages > 0 and request.computed_len % self.grid == 0
        if shared and request.keep_kv and request.lock is not None and self.keeps_snapshots:
            self.keep_at(slot, request.lock)
            self.tier.on_state(request.lock, evicted=False)
        else:
            self.drop(slot)

    def reject(self, request: Request, at: int) -> None:
        if slot := request.recurrent.snapshots.pop(at, 0):
            self.drop(slot)
        if not request.ended:
            self.rewind(request)

    def rewind(self, request: Request) -> None:
        self._rewinds[request.recurrent.slot] = request

    def _copy(self, request: Request, at: int) -> None:
        assert at % self.grid == 0, f"{request.rid}: a snapshot off the grid"
        slot = self._take()
        self._snapshots.append(StateCopy(request.recurrent.slot, slot))
        request.recurrent.snapshots[at] = slot

    # ---- the tree

    def keep_at(self, slot: int, node: Node, *, above: Node | None = None) -> None:
        """Keep a finished snapshot at `node`; it replaces the answer's `above`, unless shared."""
        if above is not None and above.state and above.locks == 1:
            self._evict(above, superseded=True)
        if node.state:  # another request's for the same tokens
            self.drop(slot)
            return
        self.allocator.to_cache([slot])
        node.state = slot
        self._nodes[slot] = node
        self.on_change(node)
        self.num_snapshots += 1

    def drop(self, slot: int) -> None:
        self.allocator.free([slot])

    def on_removed(self, node: Node, *, evicted: bool) -> None:
        if node.state:
            self._evict(node, superseded=True)  # the tier has noted the node itself

    def check_node(self, node: Node) -> None:
        assert not node.state or (node.state, node) in self._nodes.items(), "a snapshot in the tree that has gone"

    def _take(self) -> int:
        if not self.allocator.num_free:
            self._evict(next(filter(self._may_go, self._nodes.values())))
        return self.allocator.allocate(1)[0]

    def _may_go(self, node: Node) -> bool:
        return not self._peers_write or node.locks == 0

    def _evict(self, node: Node, *, superseded: bool = False) -> None:
        if not superseded:
            self.tier.on_state(node, evicted=True)
        del self._nodes[node.state]
        self.allocator.evict([node.state])
        node.state = 0
        self.on_change(node)

    def usable_match(
        self,
        cache: RadixCache,
        tokens: Sequence[int],
        branch: Branch,
        *,
        whole: Callable[[Sequence[int]], bool] = lambda window: True,
    ) -> Match:
        """A prefix is usable up to a snapshot; `whole` checks windows, too."""
        path, num_cached, usable = list[Node](), 0, 0
        window, usable_window = list[int](), 0
        for node, shared in cache.path(tokens, branch=branch):
            num_cached += shared * cache.page_size
            path.append(node)
            window += node.window[:shared]
            if node.state and shared == len(node.pages) and whole(window):
                usable, usable_window = len(path), len(window)
        cache.touch(path)
        if not usable:
            return Match([], cache.root, num_cached=num_cached)
        node = path[usable - 1]
        self._nodes.move_to_end(node.state)
        pages = [page for above in path[:usable] for page in above.pages]
        return Match(pages, node, state=node.state, num_cached=num_cached, window=tuple(window[:usable_window]))

    # ---- steps

    def attach(self, plan: Plan) -> None:
        plan.states, self._begins = self._begins, []
        plan.snapshots, self._snapshots = self._snapshots, []
        if self._rewinds:
            self._attach_rollbacks(plan)

    def _attach_rollbacks(self, plan: Plan) -> None:
        requests, self._rewinds = list(self._rewinds.values()), {}
        for request in requests:
            assert request.slot is not None, f"{request.rid}: its row has gone, and its state is to be taken back"
            plan.rewinds.append(StateRollback(request.slot, request.computed_len))
            request.inflight += 1
        self._rewinding[plan.seq] = requests

    def on_collected(self, plan: Plan, *, failed: bool) -> None:
        for request in self._rewinding.pop(plan.seq, ()):
            request.inflight -= 1

    def gauges(self) -> dict[str, float]:
        counts = self.allocator.counts()
        used = counts["held"] + counts["quarantined"]
        return {"mamba_usage": used / self.allocator.num_pages, "mamba_cached_slots": float(counts["cached"])}

    def check(self, requests: Sequence[Request]) -> None:
        self.allocator.check()
        slots = [slot for r in requests for slot in (r.recurrent.slot, *r.recurrent.snapshots.values()) if slot]
        assert len(slots) == len(set(slots)) == self.allocator.counts()["held"], "held states and owners differ"
        has_state = [r.recurrent.slot + r.recurrent.pinned > 0 for r in requests]
        assert has_state == [len(r.pages) > 0 for r in requests], "pages without a state, or a state without"
        assert not self._begins and not self._snapshots, "copies of states without a plan"
        assert all(r.recurrent.slot == slot for slot, r in self._rewinds.items()), "a state to take back has gone"
        assert all(node.state == slot and node.parent is not None for slot, node in self._nodes.items())
        assert len(self._nodes) == self.allocator.counts()["cached"]


def grid_of(page_size: int) -> int:
    return lcm(CHUNK, page_size)
