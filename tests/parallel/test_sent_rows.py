"""Rows that go to their experts' ranks over gloo, as on GPUs: each token gets the answers of its experts, whoever has which tokens."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.parallel.collectives import SINGLE_RANK
from engine.parallel.expert_rows import Compute, SentRows
from engine.parallel.layout import Place
from engine.parallel.process_groups import JointGroups, NcclCollectives
from engine.parallel.row_exchange import GroupRows

HIDDEN, EACH = 5, 3  # EACH: experts of a token
SHAPES = [(1, 2), (2, 1), (2, 2), (1, 3)]  # ranks of a DP rank, DP ranks


class Group:
    """Ranks as threads."""

    def __init__(self, tp_size: int, dp_size: int) -> None:
        self.tp_size, self.dp_size = tp_size, dp_size
        store, size = dist.HashStore(), tp_size * dp_size
        self._pool = ThreadPoolExecutor(size)

        def joined(rank: int) -> tuple[SentRows, GroupRows | None]:
            def made(name: str, index: int, count: int) -> Any:
                return dist.ProcessGroupGloo(dist.PrefixStore(name, store), index, count, timedelta(seconds=60))

            dp, tp = divmod(rank, tp_size)
            stage: Any = SINGLE_RANK
            if tp_size > 1:
                stage = NcclCollectives(made(f"stage {dp}", tp, tp_size), memory=None)
            if dp_size == 1:
                return SentRows(stage, stage=stage), None
            groups = JointGroups(ranks=made("all", rank, size), memory=None, across=made(f"across {tp}", dp, dp_size))
            place = Place(tp_rank=tp, tp_size=tp_size, dp_rank=dp, dp_size=dp_size, ep_size=size)
            rows = GroupRows(groups, stage=stage, place=place)
            return SentRows(rows.ranks, stage=stage, exchange=rows), rows

        self._ranks = list(self._pool.map(joined, range(size)))

    def answers(self, tokens: Sequence[Tensor], slots: Sequence[Tensor], *, each: int, recorded: bool) -> list[Any]:
        """Of every rank: `whole` of its tokens' answers, and the counts. `each`: slots of a rank."""
        counts = [max(map(len, tokens))] * len(tokens) if recorded else [len(own) for own in tokens]

        def of_rank(rank: int) -> tuple[Tensor, Tensor]:
            rows, exchange = self._ranks[rank]
            if exchange is not None:
                exchange.begin(counts)
            own, chosen = tokens[rank // self.tp_size], slots[rank // self.tp_size]
            total = each * len(self._ranks)
            found = rows.answers(own, chosen, multiplies(rows.own_slots(total)), total=total, recorded=recorded)
            assert found.answers.dtype == torch.float32
            return rows.whole(found.answers.flatten(1), len(own)), found.rows

        return list(self._pool.map(of_rank, range(len(self._ranks))))


def multiplies(own: range) -> Compute:
    """Expert n multiplies by n + 1; what belongs to no own expert is no number."""

    def compute(x: Tensor, counts: Tensor) -> Tensor:
        factors = torch.arange(own.start, own.stop).float().repeat_interleave(counts) + 1
        out = torch.full(x.shape, torch.nan)
        out[: len(factors)] = x[: len(factors)].float() * factors.unsqueeze(1)
        return out

    return compute


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def group(request: pytest.FixtureRequest) -> Group:
    return Group(*request.param)


@given(data=st.data(), recorded=st.booleans(), skewed=st.booleans(), each=st.integers(1, 4))
@settings(max_examples=40)
def test_each_token_gets_the_answers_of_its_experts(
    group: Group, data: st.DataObject, recorded: bool, skewed: bool, each: int
) -> None:
    """`skewed`: all tokens want the last rank's experts, and none of them is dropped."""
    counts = data.draw(st.lists(st.integers(0, 7), min_size=group.dp_size, max_size=group.dp_size).filter(any))
    total = each * group.tp_size * group.dp_size
    first = total - each if skewed else 0
    slot = st.integers(first - 1, total - 1).map(lambda slot: slot if slot >= first else -1)
    tokens = [torch.randn(count, HIDDEN).to(torch.bfloat16) for count in counts]
    slots = [
        torch.tensor(data.draw(st.lists(slot, min_size=EACH * n, max_size=EACH * n)), dtype=torch.int64).view(n, EACH)
        for n in counts
    ]
    expected = [own.float().unsqueeze(1) * (chosen.unsqueeze(2) + 1) for own, chosen in zip(tokens, slots, strict=True)]
    chosen = torch.cat(slots).flatten()
    for rank, (found, rows) in enumerate(group.answers(tokens, slots, each=each, recorded=recorded)):
        assert torch.equal(found, expected[rank // group.tp_size].flatten(1)), rank
        assert rows.tolist() == torch.bincount(chosen[chosen >= 0], minlength=total).tolist()


def test_recorded_exchanges_ask_the_host_nothing(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph could not. Other steps ask once."""
    asked, lock = [], threading.Lock()
    for name in ("tolist", "item", "nonzero"):
        whole = getattr(Tensor, name)

        def counted(self: Tensor, *args: Any, whole: Any = whole, **more: Any) -> Any:
            with lock:
                asked.append(threading.get_ident())
            return whole(self, *args, **more)

        monkeypatch.setattr(Tensor, name, counted)
    tokens = [torch.randn(4, HIDDEN) for _ in range(group.dp_size)]
    slots = [torch.arange(4 * EACH).view(4, EACH) % (group.tp_size * group.dp_size) for _ in tokens]
    for recorded in (True, False):
        asked.clear()
        group.answers(tokens, slots, each=1, recorded=recorded)
        assert len(asked) == (0 if recorded else group.tp_size * group.dp_size)
