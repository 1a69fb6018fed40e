"""Bugs of experts that move between ranks (EPLB), which tests of real ranks in one process must find: FINDERS."""

import torch

from engine.models.expert_balance import FAILED, READ, ExpertBalance
from engine.models.expert_parallel import ExpertParallelMLP, Placed
from engine.parallel import expert_placement
from engine.parallel.expert_rows import Answered, TakenRows
from service.flags import ConfigError
from tools.mutants.planting import Bugs

EXPERTS = Bugs()
_MOVING = "tests/engine/test_expert_parallel.py"
FINDERS = (
    "tests/parallel/test_expert_placement.py",
    f"{_MOVING}::test_copies_of_an_expert_share_its_tokens",
    f"{_MOVING}::test_experts_move_while_requests_run_and_no_token_changes",
    f"{_MOVING}::test_experts_of_files_that_have_changed_stay_where_they_are",
    "tests/parallel/test_expert_balance.py",
)


def _placed(placement, other):
    """The map of one placement over the weights of another."""
    return Placed(placement, other.own, count=other._count, device=other._experts.device)


# ---- map and weights change in one step, on all ranks


@EXPERTS.bug(
    "tokens go to a slot before its weights are there", ExpertBalance._move, "The map moves when the read begins."
)
def _(original, balance, place):
    layer = balance.layers[place]
    layer.placed = _placed(balance._wanted[place], layer.placed)
    original(balance, place)


@EXPERTS.bug(
    "weights move a step before the map", ExpertBalance.on_step, "For one step tokens go where experts have been."
)
def _(original, balance):
    for layer in balance.layers:
        layer.placed = vars(layer).pop("late", layer.placed)
    before = [layer.placed for layer in balance.layers]
    original(balance)
    for layer, was in zip(balance.layers, before, strict=True):
        if layer.placed is not was:
            layer.late, layer.placed = layer.placed, _placed(was.placement, layer.placed)


@EXPERTS.bug(
    "one rank moves before the others have read", ExpertBalance._move, "The first rank does not wait for the votes."
)
def _(original, balance, place):
    if balance._ranks.rank == 0 and balance._moving is None:
        layer = balance.layers[place]
        layer.placed = layer.moved(balance._wanted[place])
    original(balance, place)


@EXPERTS.bug(
    "a rank that could not read its experts votes that it has", ExpertBalance._votes, "A failed read counts as read."
)
def _(original, balance, moving):
    return [READ if vote == FAILED else vote for vote in original(balance, moving)]


@EXPERTS.bug("the files are not looked at again", ExpertParallelMLP.moved, "A read that fails leaves the old weights.")
def _(original, mlp, placement):
    try:
        return original(mlp, placement)
    except ConfigError:
        return _placed(placement, mlp.placed)


@EXPERTS.bug(
    "a rank reads its neighbour's slots", ExpertParallelMLP.moved, "Experts lie one slot beside where the map says."
)
def _(original, mlp, placement):
    return _placed(placement, original(mlp, (*placement[1:], placement[0])))


# ---- loads


def _of_own_rows(original, rows, own, slots, compute, *, total):
    found = yield from original(rows, own, slots, compute, total=total)
    return Answered(found.answers, torch.bincount(slots.reshape(-1), minlength=total))


EXPERTS.bug(
    "counters are not summed over ranks", TakenRows.answers, "Each DP rank counts its own tokens, and plans with them."
)(_of_own_rows)


@EXPERTS.bug("tokens are counted by slot", Placed.loads, "Once experts have moved the load is another expert's.")
def _(original, placed, rows):
    return rows[: placed._count].clone()


@EXPERTS.bug("a round plans with all loads since the start", ExpertBalance._loads, "What was hot once stays hot.")
def _(original, balance, place):
    return balance.layers[place].loads.tolist()


# ---- copies of an expert


@EXPERTS.bug("the tokens of a second copy are lost", ExpertParallelMLP._compute, "Only an expert's first slot answers.")
def _(original, mlp, x, rows):
    answers, begin, held = original(mlp, x, rows).clone(), 0, mlp.placed.placement
    for slot, count in zip(mlp._own, rows.tolist(), strict=True):
        if held[slot] in held[:slot]:
            answers[begin : begin + count] = 0
        begin += count
    return answers


@EXPERTS.bug("a second copy gets no tokens", Placed.slots_of, "An expert's first slot answers for all of its copies.")
def _(original, placed, chosen):
    return placed._slots[:, 0][chosen]


# ---- placements


@EXPERTS.bug("an expert has no slot", expert_placement._replicated, "A copy of the first takes the last one's place.")
def _(original, loads, slots):
    return [0 if expert == len(loads) - 1 else expert for expert in original(loads, slots)]


@EXPERTS.bug("copies fill one rank after the other", expert_placement._packed, "Loads do not matter to the packing.")
def _(original, weights, packs):
    room = len(weights) // packs
    return [list(range(pack * room, (pack + 1) * room)) for pack in range(packs)]


@EXPERTS.bug("groups of experts leave their node", expert_placement.balanced, "Machines are not regarded.")
def _(original, loads, *, slots, ranks, groups=1, nodes=1):
    return original(loads, slots=slots, ranks=ranks)


@EXPERTS.bug("the heaviest expert gets one copy", expert_placement._replicated, "All spare slots go to the lightest.")
def _(original, loads, slots):
    lightest = min(range(len(loads)), key=lambda expert: loads[expert])
    return [*range(len(loads)), *[lightest] * (slots - len(loads))]
