"""Bugs in the choice between a pair and a unified worker (--mixed); unit tests, dummies and planned clusters must find them: FINDERS."""

import math

from router.attempts.failed_workers import FailedWorkers
from router.choice import way_costs
from router.choice.policies import RoundRobin
from router.pool import workers
from router.pool.workers import WorkerTable
from router.requests import ways
from router.requests.picking import Picker
from router.requests.ways import WayChooser
from tools.mutants.planting import Bugs

WAYS = Bugs()
FINDERS = ("tests/router/test_ways.py", "tests/planner/test_mixed_pool.py")


@WAYS.bug("a prompt holds up nobody", way_costs.unified_strain, "Long prompts stop the answers of unified workers.")
def _(original, worker, ask, wanted):
    return original(worker._replace(company=0.0), ask, wanted)


@WAYS.bug("somebody is always held up", way_costs.unified_strain, "A unified worker that rests gets no long prompt.")
def _(original, worker, ask, wanted):
    return original(worker._replace(company=1.0), ask, wanted)


@WAYS.bug("the pair has no queue", way_costs.pair_strain, "Nothing overflows from a prefill worker.")
def _(original, prefill, compute, decode, answer, wanted):
    return original(prefill._replace(waiting_tokens=0), compute, decode, answer, wanted)


@WAYS.bug("decode has no batch", way_costs.pair_strain, "Nothing overflows from a decode worker.")
def _(original, prefill, compute, decode, answer, wanted):
    return original(prefill, compute, decode._replace(requests=0), answer, wanted)


@WAYS.bug("there is always room", way_costs.wait_for_room_s, "A worker without memory gets requests as any other.")
def _(original, worker, ask):
    return 0.0


@WAYS.bug("all that is missing is waited for", way_costs.wait_for_room_s, "As if nothing became free before the end.")
def _(original, worker, ask):
    return math.ceil(original(worker, ask))


@WAYS.bug("objectives add up evenly", way_costs._strain, "One that is nearly missed counts as one with room.")
def _(original, ttft_s, itl_s, wanted):
    return ttft_s / wanted.ttft_s + itl_s / wanted.itl_s


@WAYS.bug("a request's objectives are not read", ways._objectives, "Only the flags count.")
def _(original, slo, usual):
    return usual


@WAYS.bug("the last way is forgotten", ways.way_to_take, "The load goes to and fro with every figure.")
def _(original, strains, by, last):
    return original(strains, by, None)


@WAYS.bug("the last way is for ever", ways.way_to_take, "The first choice of a length stays.")
def _(original, strains, by, last):
    return by.index(last) if last in by else original(strains, by, last)


@WAYS.bug("nothing is tried", ways._wants_a_try, "A way without figures stays so.")
def _(original, way, own, fits):
    return False


@WAYS.bug("what is busy is tried, too", ways._wants_a_try, "All go where nothing is known.")
def _(original, way, own, fits):
    return not own.ttft.is_known


@WAYS.bug("a new worker has no figures", WayChooser._fit, "Its pool knows some.")
def _(original, chooser, pool, worker, which):
    return chooser.forecast.fits(worker)[which]


@WAYS.bug("both ways remember the request", WayChooser._best, "A prefix counts as cached where it never was.")
def _(original, chooser, ways_, found, hints, wanted, now_s):
    for way in found:
        for choice in way:
            chooser.policies[choice.worker.role].note(choice, hints)
    return original(chooser, ways_, found, hints, wanted, now_s)


WAYS.skip("no way remembers the request", RoundRobin.note, "Round robin stands still.", called_by=WayChooser.choose)


@WAYS.bug("a way that failed is as good", FailedWorkers.has_failed, "A retry goes where the request failed.")
def _(original, failed, worker):
    return False


@WAYS.bug("an open circuit is as good", WorkerTable.trusts, "Requests fail first, and then go the other way.")
def _(original, table, worker, *, now_s):
    return True


@WAYS.bug("one refused way refuses the request", Picker._pick_in_time, "The other would keep its objectives.")
def _(original, picker, request, slo, found):
    return original(picker, request, slo, list(found)[:1])


@WAYS.bug(
    "one way that lacks a role lacks it for all", workers._lacking, "A lost unified worker makes the router unready."
)
def _(original, of_ways):
    return [role for roles in of_ways for role in roles]


@WAYS.bug(
    "only one's own role takes over", WorkerTable.has_others, "What runs at a lone worker of its role stays there."
)
def _(original, table, worker):
    return any(other is not worker for other in table.pool(worker.role, ""))
