"""Bugs between a leader and its followers, which the simulated cluster must find: lost steps, copies, page rows, checksums."""

from dataclasses import replace

import msgspec

from engine.kv.held import total
from engine.ranks.answers import Answers, is_proven
from engine.ranks.follower import Follower
from engine.ranks.followers import Followers
from engine.ranks.messages import Step, plan_of, step_of
from engine.ranks.rank_runner import RankRunner
from tools.mutants.planting import Bugs

RANKS = Bugs()
_with = msgspec.structs.replace

# ---- the channel loses, repeats or reorders a step: the follower must notice by itself


@RANKS.bug("a step does not reach a follower", Followers._send_all, "Now and then a step is not sent.")
def _(original, followers, message):
    if not isinstance(message, Step) or message.seq % 7:
        original(followers, message)


@RANKS.bug("a step reaches a follower twice", Followers._send_all, "Now and then a step is sent twice.")
def _(original, followers, message):
    original(followers, message)
    if isinstance(message, Step) and message.seq % 7 == 0:
        original(followers, message)


@RANKS.bug(
    "a step overtakes another on its way", Followers._send_all, "Now and then a step goes after the next message."
)
def _(original, followers, message):
    late = vars(followers).pop("late", None)
    if late is None and isinstance(message, Step) and message.seq % 7 == 0:
        followers.late = message
        return
    original(followers, message)
    if late is not None:
        original(followers, late)


@RANKS.bug("a follower is one step behind", Follower.handle, "A follower runs a step when the next message comes.")
def _(original, follower, message):
    before, follower.before = vars(follower).get("before"), message
    if before is not None:
        original(follower, before)


# ---- steps of copies alone


@RANKS.bug("a follower runs no step without items", RankRunner.run, "A follower skips the copies of such a step.")
def _(original, runner, plan):
    if plan.items:
        original(runner, plan)


@RANKS.bug(
    "a follower answers before its copies are made", RankRunner.run, "A follower does not wait for copies alone."
)
def _(original, runner, plan):
    if plan.items:
        original(runner, plan)
    else:
        runner._copies.begin(plan)


@RANKS.bug("the leader does not wait for copies of its followers", is_proven, "No step is answered by the followers.")
def _(original, plan, **named):
    return True


@RANKS.bug(
    "the first answer counts for all followers", Answers.has_all, "The leader waits for one follower of several."
)
def _(original, answers, key):
    return len(answers._by_key.get(key, ())) > 0


# ---- what a follower knows of a step


@RANKS.bug("a row of pages keeps what it had", Follower.handle, "A slot's second request has the pages of the first.")
def _(original, follower, message):
    if isinstance(message, Step):
        seen = vars(follower).setdefault("seen", set())
        pages = [(i, first, ids) for i, first, ids in message.pages if first or message.slots[i] not in seen]
        seen.update(message.slots)
        message = _with(message, pages=pages)
    original(follower, message)


@RANKS.bug("do not send which adapter a slot has", step_of, "Followers compute all requests without adapters.")
def _(original, plan, **named):
    return _with(original(plan, **named), opens=[])


@RANKS.bug("do not send what comes back from the host", step_of, "Followers restore no copies of retracted requests.")
def _(original, plan, **named):
    return _with(original(plan, **named), loads=[])


@RANKS.bug("keep the copies of two requests under one key", plan_of, "A follower restores the KV of another request.")
def _(original, step):
    plan = original(step)
    saves = [replace(save, key=save.key // 2) for save in plan.saves]
    loads = [replace(load, key=load.key // 2) for load in plan.loads]
    return replace(plan, saves=saves, loads=loads, drops=[key // 2 for key in plan.drops])


@RANKS.bug("pages of copies have other numbers on a follower", plan_of, "A follower copies the page before each page.")
def _(original, step):
    plan = original(step)
    return replace(plan, saves=[replace(save, pages=[page - 1 for page in save.pages]) for save in plan.saves])


# ---- numbers and calls of all ranks


@RANKS.bug(
    "every rank has the pages that it has room for", Followers.await_ready, "The pool is not the least of all ranks."
)
def _(original, followers, **named):
    return replace(original(followers, **named), num_pages=1 << 30)


@RANKS.bug("the checksum counts a replica twice", total, "Ranks that hold the same are all added.")
def _(original, ranks):
    return original({f"{part} of {rank}": value for part, value in parts.items()} for rank, parts in enumerate(ranks))


@RANKS.bug("other weights reach the leader alone", Follower._apply, "A follower answers and keeps the weights it has.")
def _(original, follower, message):
    original(follower, _with(message, name="forget") if message.name == "use_weights" else message)
