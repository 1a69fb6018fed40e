"""Bugs in what the executor makes of states that drafts move; tests of layers, engines and ranks must find them: FINDERS."""

from contextlib import nullcontext
from dataclasses import replace

from engine.core.plan import StateCopy
from engine.executor.states import States
from engine.kernels.tape import Tape
from engine.kv.state_pool import StatePool
from engine.kv.step_batch import StepBatch
from engine.layers.recurrence import StepStates
from engine.models.remembered import Remembered
from engine.ranks import messages
from tools.mutants.planting import Bugs

REWINDS = Bugs()
FINDERS = ("tests/models/test_recurrent_layers.py", "tests/engine/test_drafted_states.py")

REWINDS.skip("no state is taken back", States.rewind, "Requests go on from the state behind rejected drafts.")


@REWINDS.bug("a row too many counts", States.rewind, "The first rejected draft of a request stays in its state.")
def _(original, states, model, rewinds):
    original(states, model, [replace(rewind, length=rewind.length + 1) for rewind in rewinds])


@REWINDS.bug(
    "the convolution's window is not taken back",
    StatePool.run,
    "Only the recurrent state goes back; the last inputs are those of rejected drafts.",
    called_by=States.rewind,
)
def _(original, pool, copies):
    windows = [[pool.conv(layer)[copy.dst].clone() for copy in copies] for layer in range(len(pool.specs))]
    original(pool, copies)
    for layer, kept in enumerate(windows):
        for copy, window in zip(copies, kept, strict=True):
            pool.conv(layer)[copy.dst] = window


@REWINDS.bug("states are kept when the rows have passed", States.end, "The shadow is the state that it should undo.")
def _(original, states, batch, hidden):
    if any(item.draft for item in batch.items):
        states.pool.run([StateCopy(run.slot, run.shadow) for run in states._verified.values()])
    original(states, batch, hidden)


@REWINDS.bug("all requests have one shadow", StatePool.shadow, "The last one's state is everybody's.")
def _(original, pool, number):
    return original(pool, 0)


@REWINDS.bug(
    "rows pass as entries of their own", StepBatch.first_rows, "They race for the state.", called_by=StepStates.begin
)
def _(original, step):
    return list(range(len(step.q_lens) + 1))


@REWINDS.bug("rows pass as a prompt does", StepStates._lay, "In chunks, where torch computes: they round otherwise.")
def _(original, states, lens, slots, decodes):
    original(states, lens, slots, [one and count == 1 for one, count in zip(decodes, lens, strict=True)])


@REWINDS.bug(
    "a tape writes over what it has kept", Tape.lasting, "Later layers' products lie where the first one's did."
)
def _(original, tape):
    return nullcontext()


@REWINDS.bug(
    "rows of another request pass again", Remembered.product_again, "They are counted from the step's first one."
)
def _(original, remembered, rows):
    return original(remembered, rows - rows.min())


@REWINDS.bug("other ranks take nothing back", messages.plan_of, "Plans of followers have no rewinds.")
def _(original, step):
    plan = original(step)
    plan.rewinds = []
    return plan
