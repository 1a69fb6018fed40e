"""DP attention: ranks that agree on each step, whatever arrives where and whoever is late. Real loops in one thread."""

import random

import pytest

from engine.core.dp_step import (
    Padding,
    PrefillDelayer,
    Row,
    UpdateAgreement,
    agree,
    padding_of,
)
from engine.messages import AbortRequest, ContinueGeneration, GenerateRequest, PauseGeneration, UpdateWeights
from engine.sampling_params import SamplingParams
from service.flags import ConfigError
from tests.core.hash_model import expected_tokens
from tests.loop.dp_ranks import CONSTRAINED, LANDS, Group, Rank, RingBoard


def ask(rid: str, prompt: list[int], *, new: int, kind: str = "") -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=new, temperature=0.0)
    return GenerateRequest(rid=rid, input_ids=prompt, sampling=sampling, stream=True, request_id=kind)


def group(
    num_ranks: int, *, seed: int = 1, depth: int = 2, delayer: PrefillDelayer | None = None, **engine: object
) -> Group:
    return Group(num_ranks, draw=random.Random(seed), depth=depth, delayer=delayer, **engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_rank_without_requests_takes_part_in_each_step_of_another_and_in_no_more(depth: int) -> None:
    ranks = group(3, depth=depth)
    ranks.rest()
    assert ranks.steps == 0 and ranks.board.last_step(0) == -1  # nothing is posted for nothing
    ranks.ranks[1].tell(ask("r", [1, 2, 3], new=5))
    ranks.rest()
    assert ranks.ranks[1].engine.tokens["r"] == expected_tokens([1, 2, 3], 5)
    assert ranks.steps == 5 and {ranks.board.last_step(rank) for rank in range(3)} == {4}
    turns = [rank.turns for rank in ranks.ranks]
    ranks.rest()
    assert [rank.turns for rank in ranks.ranks] == turns


def test_at_depth_2_a_step_is_offered_while_the_one_before_it_is_computed() -> None:
    """Then no rank waits for rows: they are there when the step ends."""
    ranks = group(2)
    for rank in ranks.ranks:
        rank.tell(ask("r", [rank.rank, 2, 3], new=30))
    for _ in range(60):  # whoever can turns before any step is computed
        while any(rank.awake for rank in ranks.ranks):
            for rank in ranks.ranks:
                rank.turn()
        assert [len(rank.launched) for rank in ranks.ranks] in ([2, 2], [1, 1], [0, 0])
        if ranks.steps < 30:
            assert [len(rank.launched) for rank in ranks.ranks] == [2, 2]
        for rank in ranks.ranks:
            rank.compute()
    assert ranks.steps == 30


def test_a_paused_rank_takes_part_and_its_pause_ends() -> None:
    ranks = group(2)
    paused, other = ranks.ranks
    paused.tell(ask("p", [1, 2, 3], new=20))
    other.tell(ask("o", [4, 5, 6], new=60))
    while len(paused.engine.tokens.get("p", [])) < 5:
        ranks.move()
    paused.tell(PauseGeneration("c", "retract"))
    while "o" not in other.engine.finish:
        ranks.move()
    assert paused.engine.scheduler.counters.retractions == 1 and "p" not in paused.engine.finish
    paused.tell(ContinueGeneration("d"))
    ranks.rest()
    assert paused.engine.tokens["p"] == expected_tokens([1, 2, 3], 20)


def test_prompts_wait_for_each_other_at_most_so_many_steps() -> None:
    """Rank 0 decodes alone: the prompt of rank 1 waits. Rank 0's next prompt lets both in."""
    starts = {}
    for passes in (1, 8, 1000):
        ranks = group(2, delayer=PrefillDelayer(max_delay_passes=passes), radix=False)
        first, second = ranks.ranks
        first.tell(ask("r", [1, 2, 3], new=80))
        while len(first.engine.tokens.get("r", [])) < 5:
            ranks.move()
        began = ranks.steps
        second.tell(ask("late", [4, 5, 6], new=2))
        ranks_of_first = False
        while "late" not in second.engine.finish:
            if ranks.steps > began + 40 and not ranks_of_first:
                first.tell(ask("mate", [7, 8, 9], new=2))
                ranks_of_first = True
            ranks.move()
        starts[passes] = ranks.steps - began
        ranks.rest()
    assert starts[1] <= 8 < starts[8] <= 24 and 40 < starts[1000] <= 60, starts


def test_a_prompt_alone_does_not_wait() -> None:
    """Nothing runs that it could slow, and no step would come that ends the delay."""
    ranks = group(2, delayer=PrefillDelayer(max_delay_passes=1000))
    for i in range(3):
        ranks.ranks[i % 2].tell(ask(f"r{i}", [i, 1, 2], new=4))
        ranks.rest()
        assert ranks.ranks[i % 2].engine.tokens[f"r{i}"] == expected_tokens([i, 1, 2], 4)


def test_anything_on_any_rank_ends_right() -> None:
    """From fixed seeds; `make soak-core` draws others."""
    seen = sum(fuzz(seed, steps=250) for seed in range(5))
    assert seen >= 1250


def fuzz(seed: int, *, steps: int) -> int:
    """Requests of all kinds, aborts and pauses on some ranks, then rest: every answer is right, and no rank is left behind."""
    draw = random.Random(seed)
    delayer = PrefillDelayer(max_delay_passes=draw.choice([2, 30])) if draw.random() < 0.7 else None
    ranks = Group(
        draw.choice([2, 3, 4]),
        draw=draw,
        depth=draw.choice([1, 2, 2, 3]),
        delayer=delayer,
        num_pages=draw.choice([24, 200]),
        chunk=draw.choice([4, 8, 16]),
        mixed_chunk=draw.random() < 0.5,
        backup_pages=draw.choice([0, 1000]),
        lag=False,
        clip=0,
    )
    asked: list[tuple[Rank, str, list[int], int]] = []
    updates = Updates(ranks, draw)
    while ranks.steps < steps:
        moved = ranks.move()
        assert moved or updates.are_read_somewhere or all(r.paused or r.engine.scheduler.idle for r in ranks.ranks), (
            "all sleep, and one has work"
        )
        if not moved or draw.random() < 0.05:
            _happen(ranks, draw, asked)
        if not moved or draw.random() < 0.02:
            updates.happen()
    updates.end_reading()
    for rank in ranks.ranks:
        rank.tell(ContinueGeneration("end"))
        rank.paused = False
    ranks.rest()
    updates.check()
    for rank in ranks.ranks:
        assert rank.engine.scheduler.idle and not rank.launched and rank.loop._pipeline.num_launched == 0
        assert ranks.board.last_step(rank.rank) == ranks.steps - 1
        rank.engine.scheduler.check()
        assert rank.engine.scheduler.memory.allocator.counts()["held"] == 0
    for rank, rid, prompt, new in asked:
        tokens, right = rank.engine.tokens[rid], expected_tokens(prompt, new)
        aborted = rank.engine.finish[rid].kind == "abort"
        assert tokens == (right[: len(tokens)] if aborted else right)
    return ranks.steps


class Updates:
    """Other weights, one after another, which every rank is sent, and reads when it likes. One of a few cannot be read somewhere."""

    def __init__(self, ranks: Group, draw: random.Random) -> None:
        self._ranks, self._draw = ranks.ranks, draw
        self._sent = 0
        self._unread: list[Rank] = []  # of the last one

    @property
    def are_read_somewhere(self) -> bool:
        return bool(self._unread)

    def happen(self) -> None:
        if self._unread:
            self._read(self._draw.choice(self._unread))
        elif all(self._call in rank.replies for rank in self._ranks) or not self._sent:
            self.check()
            self._sent += 1
            for rank in self._ranks:
                rank.tell(UpdateWeights(self._call, f"weights {self._sent}"))
            self._unread = list(self._ranks)

    def end_reading(self) -> None:
        while self._unread:
            self._read(self._unread[0])

    @property
    def _call(self) -> str:
        return f"update {self._sent}"

    def _read(self, rank: Rank) -> None:
        while rank.ports.inbox:
            rank.turn()
        self._unread.remove(rank)
        if self._draw.random() < 0.15:
            rank.weights.future.set_exception(ConfigError("no such file"))
        else:
            rank.weights.future.set_result(f"weights {self._sent}")
        rank.ports.call_attention()

    def check(self) -> None:
        """All took the last ones, or none did."""
        answers = {rank.replies[self._call].ok for rank in self._ranks} if self._sent else {True}
        assert len(answers) == 1 and len({rank.weights.model_path for rank in self._ranks}) == 1


def _happen(ranks: Group, draw: random.Random, asked: list[tuple[Rank, str, list[int], int]]) -> None:
    rank = draw.choice(ranks.ranks)
    what = draw.choice(["ask"] * 8 + ["abort", "pause", "continue", "continue"])
    if what == "ask":
        rid, new = f"r{len(asked)}", draw.randint(1, 20)
        prompt = [draw.randrange(3), *range(draw.randint(1, 30))]
        asked.append((rank, rid, prompt, new))
        rank.tell(ask(rid, prompt, new=new, kind=draw.choice(["", "", LANDS, CONSTRAINED])))
    elif what == "abort" and asked:
        victim, rid, _, _ = draw.choice(asked[-8:])
        victim.tell(AbortRequest(rid))
    elif what == "pause" and not rank.paused:
        rank.paused = True
        rank.tell(PauseGeneration("p", draw.choice(["retract", "in_place"])))
    elif what == "continue":
        rank.paused = False
        rank.tell(ContinueGeneration("c"))


# ---- by literals


def row(tokens: int, *, step: int = 7, **fields: object) -> Row:
    return Row(step=step, idle=tokens == 0, tokens=tokens, **{"running": tokens, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "extend", "padding"),
    [
        ([8, 8], False, Padding.MAX_LEN),
        ([8, 1], False, Padding.MAX_LEN),
        ([8, 0], False, Padding.SUM_LEN),  # 16 is not more than 16
        ([8, 0, 0, 9], False, Padding.SUM_LEN),
        ([8, 2, 0, 9], False, Padding.MAX_LEN),
        ([8, 8], True, Padding.SUM_LEN),
    ],
)
def test_padding_is_what_moves_fewer_bytes(tokens: list[int], extend: bool, padding: Padding) -> None:
    assert padding_of(tokens, extend=extend) is padding


def test_a_step_is_the_same_for_all_ranks() -> None:
    decode = agree([row(5), row(3)])
    assert (decode.tokens, decode.graph) == ((5, 5), True)
    mixed = agree([row(5, extend=True, can_graph=False), row(0)])
    assert (mixed.tokens, mixed.extend, mixed.graph) == ((5, 0), True, False)
    assert not agree([row(5), row(3, can_graph=False)]).graph
    for rows in ([row(0), row(0)], [row(1), row(1, step=8)]):
        with pytest.raises(AssertionError):
            agree(rows)


def test_no_rank_computes_between_the_first_change_of_weights_and_the_last() -> None:
    board = RingBoard(2, depth=1)
    board.wake = [lambda: None] * 2
    first, second = ranks = [UpdateAgreement(board, rank=rank) for rank in range(2)]
    for rank in ranks:
        rank.begin()
    assert not first.all_ready() and first.holds and not second.holds
    assert second.all_ready()
    second.taken()
    assert second.holds and first.all_ready(), "the first has the old ones yet"
    first.taken()
    assert not first.holds and not second.holds
    for rank in ranks:
        rank.begin()
    assert not second.all_ready()
    first.refuse()
    assert second.refused_by() == 0 and second.holds
    second.refuse()
    assert not second.holds and first.refused_by() == 0


def test_the_delayer_waits_for_the_last_rank_or_its_limit() -> None:
    some, all_, none = [row(1, prefillable=True), row(1)], [row(1, prefillable=True)] * 2, [row(1)] * 2
    delayer = PrefillDelayer(max_delay_passes=4)
    assert [delayer.allows(some) for _ in range(8)] == [False, False, False, True] * 2
    assert [delayer.allows(rows) for rows in (some, some, all_, some, none)] == [False, False, True, False, False]
    assert [delayer.allows(some) for _ in range(4)] == [False, False, False, True]  # counted anew


def test_the_delayer_keeps_no_prompt_where_nothing_runs() -> None:
    assert PrefillDelayer().allows([row(0, prefillable=True), row(0, prefillable=True), row(0)])
