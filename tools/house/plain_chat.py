"""Limits of the files that a plain streamed chat enters.

A test of the suite starts a cluster, measures and compares (tests/house/test_plain_chat.py), as no reading of the source can.
`make lint` shows the limits, which a row that rises must explain, and takes them for the values of today.
"""

from collections.abc import Mapping

from tools.house.ratchet import FILE, limit_of, parse
from tools.house.tree import Rule, Tree

ALL, HAND_OVER = "files", "files of the hand-over"


def limits(tree: Tree) -> Mapping[str, int]:
    return limits_in(tree.text(FILE))


def limits_in(text: str) -> Mapping[str, int]:
    """What house.toml, its text, allows."""
    table = parse(text).get(RULE.name, {})
    return {key: limit_of(RULE, table, key) for key in RULE.aims}


RULE = Rule(
    name="plain_chat",
    what="files that a plain chat enters",
    remedy="a feature's code belongs into its own room, which a plain chat does not enter",
    measure=limits,
    aims={ALL: 100, HAND_OVER: 25},
)
RULES = (RULE,)
