"""Nodes of the prefix tree."""

from typing import NamedTuple

Rank = tuple[int, int]


class Branch(NamedTuple):
    """The identity of a prefix besides its tokens: the load of an adapter (0: the model alone), and the namespace of the request."""

    adapter: int = 0
    namespace: tuple[str, ...] = ()


TRUNK = Branch()


class Node:
    """`key`: the tokens of this edge; `pages`: one per page_size tokens. `branch`: of a branch's top, which has neither."""

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
        self.noted: Rank | None = None  # the rank under which the eviction order has it
        self.serial = serial
        self.keys: list[bytes] = []  # of its pages, where a tier below listens
        self.uses = 1  # requests that computed or read it
        self.priority = 0  # the highest of these requests
        self.window: list[
            int
        ] = []  # of a model with windows, beside `pages`: 0 where a page is gone (engine/core/window_pages.py)
        self.state = 0  # slot of a snapshot of the recurrent state at the node's end (engine/core/state_slots.py)

    @property
    def is_evictable(self) -> bool:
        """An unlocked leaf, still in the tree."""
        return self.locks == 0 and not self.children and self.parent is not None


class TreePart:
    """The base of what follows the nodes of a tree; a hook that a part does not have does nothing."""

    def on_stored(self, node: Node) -> None:
        """Note a new leaf."""

    def on_split(self, upper: Node, lower: Node) -> None:
        """`upper` has got the first pages of `lower`."""

    def on_removed(self, node: Node, *, evicted: bool) -> None:
        """Note that a leaf goes. `evicted`: False: with all other nodes."""

    def on_cleared(self) -> None:
        """Note that all nodes have gone, each as a leaf that was not evicted."""

    def check_node(self, node: Node) -> None:
        """Raise AssertionError unless `node` has what this part keeps in the nodes of the tree."""
