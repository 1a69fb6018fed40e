"""Limits of the files that a plain streamed chat enters.

A test of the suite starts a cluster, measures and compares (tests/house/test_plain_chat.py), as no reading of the source can.
`make lint` shows the limits, which a row that rises must explain, and takes them for the values of today.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from tools.house.ratchet import FILE, parse
from tools.house.tree import Tree

ALL, HAND_OVER = "files", "files of the hand-over"
AIMS: Mapping[str, int] = tomllib.loads(Path(__file__).with_name("rules.toml").read_text())["plain_chat"]["aims"]


def limits(tree: Tree) -> Mapping[str, int]:
    return limits_in(tree.text(FILE))


def limits_in(text: str) -> Mapping[str, int]:
    """What house.toml, its text, allows."""
    table = parse(text).get("plain_chat", {})
    return {key: table[key].limit if key in table else aim for key, aim in AIMS.items()}
