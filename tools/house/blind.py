"""The base path names no feature: the files that every step of a plain request goes through, and the register's words."""

from collections.abc import Mapping

from tools.house.register import Register
from tools.house.seams import BASE_PATH
from tools.house.tree import Rule, Tree


def lines_naming_features(tree: Tree) -> Mapping[str, int]:
    """File of the base path -> its lines that name a feature which neither owns the file nor belongs to the base path."""
    register = Register(tree)
    base = {name for name, feature in register.features.items() if feature.base}
    there = [path for path in BASE_PATH if path in register.texts]
    found = {path: sum(bool(named - base) for named in register.mentions(path)) for path in there}
    return {"all base path": sum(found.values()), **found}


RULES = (
    Rule(
        name="blind",
        what="lines that name a feature",
        remedy="move what the feature does here into its room, as a part that this file does not name",
        measure=lines_naming_features,
        slack=2,
    ),
)
