"""Prefix tree nodes."""

from typing import NamedTuple

Rank = tuple[int, int]


class Branch(NamedTuple):
    """Prefix identity besides tokens: adapter load (0: base model), and namespace."""

    adapter: int = 0
    namespace: tuple[str, ...] = ()


TRUNK = Branch()


class Node:
    """Edge tokens `key`, a page per page_size tokens; branch tops have only `branch`."""

    __slots__ = (
        "branch",
        "children",
        "created",
        "key",
        "keys",
        "last_used",
        "locks",
        "noted",
        "pages",
        "parent",
        "priority",
        "serial",
        "state",
        "uses",
        "window",
    )

    def __init__(
        self,
        *,
        key: tuple[int, ...],
        pages: list[int],
        parent: "Node | None",
        serial: int,
        branch: Branch | None = None,
    ) -> None:
        self.branch = branch
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = 0
        self.created = self.last_used = 0  # by the tree's clock
        self.noted: Rank | None = None  # its rank in the eviction order
        self.serial = serial
        self.keys: list[bytes] = []  # of pages, for lower tiers
        self.uses = 1  # by requests that computed or read it
        self.priority = 0  # the highest of these requests
        self.window: list[int] = []  # parallel to `pages`, 0 if missing (engine/core/window_pages.py)
        self.state = 0  # recurrent state slot at the node's end (engine/core/state_slots.py)

    @property
    def is_evictable(self) -> bool:
        """An unlocked leaf in the tree."""
        return self.locks == 0 and not self.children and self.parent is not None


class TreePart:
    """Base of tree followers, with empty hooks."""

    def on_stored(self, node: Node) -> None:
        """Note a new leaf."""

    def on_split(self, upper: Node, lower: Node) -> None:
        """Move the first pages' data from `lower` to `upper`."""

    def on_removed(self, node: Node, *, evicted: bool) -> None:
        """Note a removed leaf. `evicted`: False if all nodes are dropped."""

    def on_cleared(self) -> None:
        """Note that all nodes are gone, each removed without eviction."""

    def check_node(self, node: Node) -> None:
        """Raise AssertionError unless `node` has its data of this part."""
