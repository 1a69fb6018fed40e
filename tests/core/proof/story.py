"""What may happen to an engine, as values that hypothesis draws and shrinks: a setup, then events in order.

A story says nothing of what is right; that is the driver's and the oracle's.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from hypothesis import strategies as st

from engine.core.policy import NO_PRIORITIES, POLICIES, Priorities
from engine.images import KEY_BYTES, ImageInput, key_ids
from tests.core.guesses import KINDS as GUESSES
from tests.core.guesses import MODELED, TREES

ROLES = ("unified", "prefill", "decode")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One engine. `chunk_pages` None: prompts go whole. `clip`: the estimate of growth, cut there (0: none grows).

    `lag`: steps run when they are collected. `gives_nan`: the model sometimes does. `depth`: with one pipeline stage; more
    stages are so much deeper. `state_slots`: of a model with recurrent states; 0: it has none. `grid`: where its prompts may be cut.
    `window`: tokens that queries of some layers see; 0: all layers see all. `drafts`: how requests are drafted (tests/core/guesses.py), by up
    to `most_drafts` tokens; "": not at all; with states of at most `shadows` requests in a step. `max_loras_per_batch`: adapters in a step.
    `image_room`: tokens of images whose features there is room for; 0: the model sees none.
    """

    role: str
    page_size: int
    capacity: int
    max_running: int
    depth: int
    lag: bool
    chunk_pages: int | None
    mixed_chunk: bool
    radix: bool
    policy: str
    priorities: Priorities
    conservativeness: float
    clip: int
    backup_pages: int
    reserve_floor: int
    max_prefill_tokens: int
    prefill_max_requests: int | None
    max_queued: int
    gives_nan: bool
    pp_size: int
    pp_async_batch_depth: int
    state_slots: int = 0
    grid: int = 8
    window: int = 0
    more_window_pages: int = 0
    drafts: str = ""
    most_drafts: int = 0
    shadows: int = 0
    max_loras_per_batch: int = 0
    image_room: int = 0
    multiplexed: bool = False


PLACEHOLDER = 49  # stands for a part of an image
SIZES = ((1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (2, 1))  # of images by number: rows and columns of tokens


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request: a prompt of `length` tokens of one of few families (so that prefixes are shared), and its wishes.

    `stop`: "" | "eos" | "ids" | "string"; `stop_at`: which of the expected tokens it is. `logprob_from`: -1 output only. `adapter`: number
    of its load; 0: the model alone. `image_places`: of each image the tokens of text before it, and its number; what does not fit is left out.
    """

    family: int
    length: int
    new: int
    priority: int
    stop: str
    stop_at: int
    min_new: int
    grammar: tuple[int, int] | None
    logprob_from: int | None
    hidden: bool
    pooling: str
    keep_kv: bool
    fill: bool  # `new` is as much as the whole memory holds
    adapter: int = 0
    namespace: tuple[str, ...] = ()
    image_places: tuple[tuple[int, int], ...] = ()

    @cached_property
    def prompt(self) -> list[int]:
        found = [(self.family * 7 + k) % 50 for k in range(self.length)]
        for image in self.images:
            found[image.start : image.end] = [PLACEHOLDER] * image.num_tokens
        return found

    @cached_property
    def images(self) -> tuple[ImageInput, ...]:
        found, at = list[ImageInput](), 0
        for text, number in self.image_places:
            rows, columns = SIZES[number]
            begin, at = at + text, at + text + rows * columns
            if at <= self.length:
                grid = (1, rows * 2, columns * 2)
                found.append(ImageInput(begin, rows * columns, bytes([number] * KEY_BYTES), grid, 2, grid))
        return tuple(found)

    @cached_property
    def read(self) -> list[int]:
        """What the model reads of its tokens."""
        return key_ids(self.images, self.prompt, 0)


@dataclass(frozen=True)
class Event:
    """`kind`: "turns" (n of them), "abort" (request n), "abort-retracted" (n-th of those), "move" (the outside goes on with its n-th request), "flush",

    "update" (other weights), "continue", or "pause-" and a mode.
    """

    kind: str
    n: int = 0


@dataclass(frozen=True)
class Story:
    setup: Setup
    events: tuple[Ask | Event, ...]


PRIORITIES = (
    Priorities(preempt_threshold=0),
    Priorities(preempt_threshold=4),
    Priorities(low_first=True, aging_s=3.0, preempt_threshold=2),
)


def _setups(**fixed: st.SearchStrategy[object]) -> st.SearchStrategy[Setup]:
    drawn: dict[str, st.SearchStrategy[object]] = dict(
        role=st.sampled_from(ROLES),
        page_size=st.sampled_from([1, 2, 4]),
        capacity=st.sampled_from(range(46, 90)),
        max_running=st.sampled_from(range(1, 8)),
        depth=st.sampled_from([1, 2, 2, 3]),
        lag=st.booleans(),
        chunk_pages=st.sampled_from([None, 1, 2, 3, 8]),
        mixed_chunk=st.booleans(),
        radix=st.sampled_from([True, True, False]),
        policy=st.sampled_from(POLICIES),
        priorities=st.sampled_from([NO_PRIORITIES, *PRIORITIES, *PRIORITIES]),
        conservativeness=st.sampled_from([0.0, 0.0, 0.0, 1.0, 2.0]),
        clip=st.sampled_from([0, 0, 0, 3, 4096]),
        backup_pages=st.sampled_from([0, 8, 1000]),
        reserve_floor=st.sampled_from([0, 4]),
        max_prefill_tokens=st.sampled_from([16, 64]),
        prefill_max_requests=st.sampled_from([None, None, 1, 2]),
        max_queued=st.sampled_from([1000, 1000, 1000, 4]),
        gives_nan=st.booleans(),
        pp_size=st.sampled_from([1, 1, 2, 4]),
        pp_async_batch_depth=st.sampled_from([0, 0, 1]),
    )
    return st.builds(Setup, **{**drawn, **fixed})


def asks() -> st.SearchStrategy[Ask]:
    return st.builds(
        Ask,
        family=st.integers(0, 3),
        length=st.sampled_from([0, *range(1, 29)]),
        new=st.sampled_from(range(21)),
        priority=st.sampled_from(range(-12, 13)),
        stop=st.sampled_from(["", "", "", "eos", "ids", "string"]),
        stop_at=st.integers(0, 10),
        min_new=st.sampled_from([0, 0, 0, 5]),
        grammar=st.sampled_from([None, None, None, (0, 4), (1, 9), (2, 40)]),
        logprob_from=st.sampled_from([None, None, -1, 0, 3, 12]),
        hidden=st.sampled_from([False, False, False, True]),
        pooling=st.sampled_from(["", "", "", "", "", "last", "mean"]),
        keep_kv=st.sampled_from([True, True, True, False]),
        fill=st.sampled_from([False] * 19 + [True]),
    )


Owner = tuple[int, tuple[str, ...]]  # adapter and namespace of a request
ADAPTERS = (0, 0, 1000, 2000, 3000)  # far apart: the hash model adds the number of its weights


KINDS = {
    "turns": 40,
    "move": 30,
    "abort": 6,
    "abort-retracted": 3,
    "continue": 6,
    "pause-retract": 5,
    "pause-in_place": 1,
    "pause-abort": 1,
}
KINDS |= {"flush": 1, "update": 1}


def _on_the_grid(setup: Setup) -> Setup:
    """With states prompts are cut on the grid alone."""
    if not setup.state_slots or setup.chunk_pages is None:
        return setup
    grids = -(-setup.chunk_pages * setup.page_size // setup.grid)
    return replace(setup, chunk_pages=grids * setup.grid // setup.page_size)


def stories_with_groups(*, states: bool = False, windows: bool = False, **own: Any) -> st.SearchStrategy[Story]:
    """`states`: of a model with recurrent layers, and more requests than there are slots; `windows`: of layers that see one.

    With both, states outlive the windows that they need. `own`: of the setup.
    """
    few, many = [1, 2, 3, 5, 12], [3, 5, 12, 20]
    drawn: dict[str, st.SearchStrategy[object]] = {}
    if states:
        drawn |= dict(state_slots=st.sampled_from(many if windows else few), grid=st.sampled_from([4, 8]))
    if windows:
        drawn |= dict(
            window=st.sampled_from([1, 2, 3, 5, 6, 9, 16]),
            more_window_pages=st.sampled_from([0, 0, 1, 3] if states else [0, 3, 10, 30]),
        )
    return _stories(_setups(**{**drawn, **own}).map(_on_the_grid))


def stories_with_images() -> st.SearchStrategy[Story]:
    """Requests with few images in turn, and without, and room for the features of as few."""

    def shown(story: Story, image_places: list[tuple[tuple[int, int], ...]]) -> Story:
        drawn = itertools.cycle(image_places)
        events = (replace(e, image_places=next(drawn)) if isinstance(e, Ask) else e for e in story.events)
        return Story(story.setup, tuple(events))

    setup = _setups(
        image_room=st.sampled_from([5, 9, 10, 13, 20, 100]),
        state_slots=st.sampled_from([0, 0, 0, 5, 12]),
        grid=st.sampled_from([4, 8]),
    )
    plain = _stories(setup.map(_on_the_grid))
    place = st.tuples(st.sampled_from([0, 0, 1, 2, 3, 5]), st.sampled_from(range(len(SIZES))))
    some = st.lists(st.lists(place, max_size=5).map(tuple), min_size=4, max_size=12)
    return st.builds(shown, plain, some)


def stories_with_adapters(*, states: bool = False, windows: bool = False) -> st.SearchStrategy[Story]:
    """Several requests of two prompts, whose KV depends on an adapter, too, or that share it in a namespace alone."""

    def spread(story: Story, drawn: list[Owner], places: int) -> Story:
        asked = (replace(e, family=e.family % 2) if isinstance(e, Ask) else e for e in story.events)
        return Story(replace(story.setup, max_loras_per_batch=places), spread_among(drawn, asked))

    own = dict(role=st.sampled_from(["unified"] * 3 + ["prefill", "decode"]), pp_size=st.sampled_from([1, 1, 1, 2, 4]))
    own |= dict(max_running=st.sampled_from(range(3, 8)), more_window_pages=st.sampled_from([0, 3, 10, 30]))
    own |= dict(radix=st.sampled_from([True] * 5 + [False]))
    of_groups = stories_with_groups(states=states, windows=windows, **own)
    return st.builds(spread, of_groups, branches(), st.sampled_from([1, 2, 3, 3]))


def branches() -> st.SearchStrategy[list[Owner]]:
    """Adapters and namespaces for requests in turn."""
    one = st.tuples(st.sampled_from(ADAPTERS), st.sampled_from([(), (), ("a",), ("a", "b")]))
    return st.lists(one, min_size=3, max_size=8)


def spread_among(drawn: list[Owner], events: Iterable[Ask | T]) -> tuple[Ask | T, ...]:
    """Give each request among `events` the adapter and the namespace that are its turn."""
    return tuple(
        replace(event, adapter=adapter, namespace=namespace) if isinstance(event, Ask) else event
        for event, (adapter, namespace) in zip(events, itertools.cycle(drawn), strict=False)
    )


def _events() -> st.SearchStrategy[Event]:
    kinds = [kind for kind, weight in KINDS.items() for _ in range(weight)]
    return st.builds(Event, st.sampled_from(kinds), st.sampled_from(range(10)))


def _stories(setup: st.SearchStrategy[Setup]) -> st.SearchStrategy[Story]:
    event = st.one_of(asks(), _events(), asks(), _events(), _events())
    return st.builds(Story, setup, st.lists(event, min_size=25, max_size=60).map(tuple))


def stories() -> st.SearchStrategy[Story]:
    return _stories(_setups(pp_size=st.sampled_from([1, 2, 2, 4])))


def _drafting(**own: st.SearchStrategy[object]) -> st.SearchStrategy[Setup]:
    """Of one pipeline stage: drafts follow known tokens, and stages have others in flight."""
    return _setups(
        role=st.sampled_from(["unified", "decode"]),
        pp_size=st.just(1),
        **own,
        window=st.sampled_from([0, 0, 1, 5, 9]),
        more_window_pages=st.sampled_from([0, 3, 10]),
    )


def stories_with_drafts() -> st.SearchStrategy[Story]:
    return _stories(_drafting(drafts=st.sampled_from(GUESSES), most_drafts=st.sampled_from([1, 2, 3, 7, 20])))


def stories_with_a_drafter() -> st.SearchStrategy[Story]:
    """As with drafts, which a model in the executor makes: its entries of tokens and the tails of pages follow from prefixes, too."""
    drafts = [begin + kind for begin in (MODELED, TREES) for kind in GUESSES]
    return _stories(_drafting(drafts=st.sampled_from(drafts), most_drafts=st.sampled_from([1, 2, 3, 7, 12])))


def stories_with_states_and_drafts() -> st.SearchStrategy[Story]:
    """Drafts that move recurrent states, of any drafter, with windows or without, and now and then for fewer requests than run."""
    setup = _drafting(
        drafts=st.sampled_from([*GUESSES, *(MODELED + kind for kind in GUESSES)]),
        most_drafts=st.sampled_from([1, 2, 3, 7, 20]),
        shadows=st.sampled_from([1, 2, 7, 7]),
        state_slots=st.sampled_from([1, 2, 3, 5, 12, 20]),
        grid=st.sampled_from([4, 8]),
    )
    return _stories(setup.map(_on_the_grid))


def stories_with_lanes() -> st.SearchStrategy[Story]:
    """Prompts and decodes in two lanes, whose steps are planned, run and collected in any order."""
    setup = _setups(
        role=st.sampled_from(["unified", "unified", "unified", "decode"]),  # prefill has one lane
        max_running=st.sampled_from(range(2, 8)),
        multiplexed=st.just(True),
        mixed_chunk=st.just(False),
        pp_size=st.just(1),
        backup_pages=st.just(0),
        window=st.sampled_from([0, 0, 0, 1, 5, 9]),
        more_window_pages=st.sampled_from([0, 3, 10]),
        image_room=st.sampled_from([0, 0, 9, 100]),
    )
    return _stories(setup)


def rushes() -> st.SearchStrategy[Story]:
    """Requests of any priority that arrive faster than they end, at an engine that has rows for more than it has pages for."""
    setup = _setups(
        role=st.sampled_from(["unified", "decode"]),
        priorities=st.sampled_from(PRIORITIES),
        max_running=st.sampled_from([5, 6, 7]),
        max_queued=st.just(1000),
        chunk_pages=st.sampled_from([2, 3, 8]),
    )
    few_turns = st.builds(Event, st.just("turns"), st.sampled_from([1, 2, 3]))
    move = st.builds(Event, st.just("move"), st.sampled_from(range(10)))
    event = st.one_of(asks(), few_turns, move, few_turns, move)
    return st.builds(Story, setup, st.lists(event, min_size=25, max_size=60).map(tuple))
