"""Bugs of recurrent states that cross between unlike ranks, which tests of real ranks in one process must find: FINDERS."""

from dataclasses import replace

from engine.kv.state_pool import StatePool, StateSpec
from tools.mutants.planting import Bugs

STATES = Bugs()
FINDERS = ("tests/e2e/test_state_pairs.py",)


@STATES.bug(
    "the convolution's state is cut as one run",
    StateSpec.part,
    "Channels of q, k and v are cut together, so ranks of another TP get others' (SGLang #22060).",
)
def _(original, spec):
    part = original(spec)
    share = part.num_channels // part.num_heads
    return replace(part, channels=(range(part.heads.start * share, part.heads.start * share + spec.conv[0]),))


@STATES.bug("heads of the state are counted from the first", StateSpec.part, "Each rank writes where rank 0 does.")
def _(original, spec):
    part = original(spec)
    return replace(part, heads=range(len(part.heads)))


@STATES.bug("layers of a later stage land in those of the first", StatePool.runs, "Each stage counts from layer 0.")
def _(original, pool, layers):
    return original(pool, range(len(layers)))
