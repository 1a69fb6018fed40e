"""Everything that a seed decides about a run, in one printed value: shape of the cluster, times, rates, fault kinds."""

import random
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from service.http.reconnect import MAX_KEPT_BYTES

SECRET = b"a secret of the simulated cluster"
LARGEST_IMAGE = 9  # tokens
GRID = 4  # where prompts of a model with recurrent layers may be cut: a multiple of every page
FIRST_WITH_GROUPS = 1000  # what earlier seeds draw stays
FIRST_WITH_PREFIXES = 2000
FIRST_WITH_RETURNS = 3000
FIRST_WITH_HEARTBEATS = 4000
FIRST_WITH_IMAGES = 5000
FIRST_WITH_ENCODERS = 6000
FIRST_WITH_WHOLE = 7000
FIRST_WITH_TURNS = 8000
FIRST_WITH_FETCHED_STATES = 9000
_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
EARLIER_FAULTS, LATER_FAULTS, PART_FAULTS, ENCODER_FAULTS = map(tuple, _DATA["faults"].values())
FAULTS = (*EARLIER_FAULTS, *LATER_FAULTS, *PART_FAULTS, *ENCODER_FAULTS)


@dataclass(frozen=True, kw_only=True)
class EngineBehaviour:
    """Shares and times of one run.

    `late_done`: operations that end well and say so late. `late`: copies of FAILED ones that go on, for `max_linger_s` at most.
    `stays_late`: until then; else they land when they would have without the failure, if that is sooner.
    """

    copy_s: tuple[float, float]
    slow_rate: float
    slow_s: float
    fail_rate: float
    late_done_rate: float
    late_rate: float
    max_linger_s: float
    connect_fail_rate: float
    fence_fail_rate: float
    fence_s: float
    settle_s: float
    gives_up_s: float  # an operation whose way is blocked fails after so long
    flip_rate: float = 0.0  # copies of pages that arrive damaged
    stays_late: bool = False


@dataclass(frozen=True, kw_only=True)
class Options:
    seed: int
    num_prefill: int
    num_decode: int
    faults: tuple[str, ...]
    fault_every_s: float
    length_s: float  # of the phase with faults
    num_requests: int
    burst: int
    page_size: int
    pages: tuple[int, int]
    chunk: int
    depth: tuple[int, int]
    max_running: int
    rows: int
    resume: str  # how decode's retracted requests get their KV again: recompute | host | prefill
    backup_pages: int
    shared_bootstrap: bool
    fixed_control_port: bool
    same_host: bool  # proof of death by /proc instead of by knocking
    secret: bool
    policy: str
    retry_max: int
    delay_s: tuple[float, float]
    clock_s: float  # a turn's shortest pause
    engine: EngineBehaviour
    transfer_retries: int = 1
    max_queued: int = 100  # requests that may wait at a worker
    max_concurrent: int = 10_000  # requests that the router serves at once
    early_rejection: bool = False
    deadlines: bool = False  # some clients say how long they wait
    drain_timeout_s: float = 2.0
    checksum: bool = False  # of pages: whoever reads damaged ones notices
    priorities: bool = False
    embeddings: bool = False
    prealloc_timeout_s: float = 10.0
    layers: int = 1  # groups of layers that pages leave in; 1: they leave whole
    num_tenants: int = 0  # that send an `extra_key`, beside the clients that send none
    stages: tuple[int, int] = (1, 1)  # of each role's pipeline, which is so much deeper
    host_memory: bool = True  # the engine carries it; else metadata rows cross the control plane
    ranks: tuple[int, int] = (1, 1)  # of a prefill and of a decode worker
    kv_units: int = 1  # of a page; fewer than ranks: all ranks hold replicas
    host_pages: int = 0  # of the host tier of prefill workers that have followers
    must_poll: bool = False  # writes land while decode polls its engines
    state_slots: tuple[int, int] = (0, 0)  # of a model with recurrent layers; (0, 0): it has none
    window: int = 0  # tokens that queries of some layers see; 0: all layers see all
    more_window_pages: int = 0  # than the least
    step_fail_rate: float = 0.0  # of steps that find no memory on their device
    whole: float = 0.0  # share of requests that their clients send to one worker alone, past the routers
    num_routers: int = 1
    resume_window_s: float = 0.0  # of streams whose clients come again; 0: none do
    most_kept_bytes: int = MAX_KEPT_BYTES  # of these, at a worker
    silence_s: float = 0.4  # more than the slowest links take for a connection, a question and its answer
    heartbeats: bool = False  # workers send the router some over an open stream
    prefix_fetch: bool = False  # prefill workers are told of others, which may have a prompt's prefix
    prefixes_of_decode: bool = False  # these may be decode workers, which then are told, too
    image_room: int = 0  # tokens of images whose features a worker keeps; 0: the model sees none
    num_encode: int = 0  # encoder workers, which compute these features for prefill workers
    feature_page: int = 1  # tokens whose features are one page of a transfer
    feature_pages: tuple[int, int] = (
        0,
        0,
    )  # in which features arrive at a prefill worker, and that an encoder worker keeps
    feature_rows: int = 16  # metadata rows beside those of KV
    feature_timeout_s: float = 2.0  # the longest that a prompt waits for features
    encode_room: int = 9  # tokens of images that a step of an encoder worker computes
    encoder_engine: EngineBehaviour | None = None  # that encoder workers write by; None: as all

    def lines(self) -> list[str]:
        return [f"  {name:18} {value}" for name, value in asdict(self).items()]


def options_of(seed: int, *, nodes: int | None = None, faults: tuple[str, ...] | None = None) -> Options:
    """`nodes`: workers in all (2 at least), `faults`: only these kinds (empty: none); both drawn where not given."""
    draw = random.Random(f"{seed}/options")
    drawn_nodes = draw.choice([2, 3, 4, 5, 6, 8])
    num_nodes = nodes if nodes is not None else drawn_nodes
    fewest = max(1, num_nodes // 2 - 1)
    num_prefill = draw.randint(fewest, num_nodes - fewest)
    drawn = tuple(kind for kind in EARLIER_FAULTS if draw.random() < draw.choice([0.2, 0.6, 1.0]))
    later = random.Random(f"{seed}/later options")  # a stream of its own: what older seeds draw stays
    drawn += tuple(kind for kind in LATER_FAULTS if later.random() < 0.4)
    checksum, flip_rate = later.random() < 0.5, later.choice([0.0, 0.002, 0.02])
    of_ranks = random.Random(f"{seed}/ranks")
    has_ranks = of_ranks.random() < 0.4
    stages = random.Random(f"{seed}/depth of pipelines").choice([(1, 1)] * 4 + [(2, 1), (1, 2), (2, 2)])
    returns = random.Random(f"{seed}/returns")
    with_returns = seed >= FIRST_WITH_RETURNS and returns.random() < 0.7
    drawn += _faults_of_parts(seed, followers=has_ranks or stages != (1, 1), returns=with_returns)
    chosen = drawn if faults is None else faults
    page_size = draw.choice([1, 2, 4])
    tight = draw.random() < 0.5
    wide = 1 if draw.random() < 0.8 else 4
    low_s = draw.choice([0.0001, 0.001, 0.005])
    options = Options(
        seed=seed,
        num_prefill=num_prefill,
        num_decode=num_nodes - num_prefill,
        faults=chosen,
        fault_every_s=draw.choice([0.2, 0.5, 1.0]),
        length_s=draw.choice([4.0, 8.0, 12.0]),
        num_requests=draw.choice([20, 40, 60]),
        burst=draw.choice([2, 10, 20]),
        page_size=page_size,
        pages=(draw.randint(60, 120) * (1 if tight else 4) // page_size, draw.randint(48, 90) * wide // page_size),
        chunk=draw.choice([1, 2, 8]) * page_size,
        depth=(draw.randint(1, 2), draw.randint(1, 2)),
        max_running=draw.choice([2, 6, 8]),
        rows=draw.choice([2, 6, 16]),
        resume=draw.choice(["recompute", "host", "prefill", "prefill"]),
        backup_pages=draw.choice([8, 1000]),
        shared_bootstrap=draw.random() < 0.5,
        fixed_control_port=draw.random() < 0.5,
        same_host=draw.random() < 0.5,
        secret=draw.random() < 0.5,
        policy=draw.choice(["least_load", "round_robin", "random"]),
        retry_max=draw.choice([0, 1, 3]),
        delay_s=(low_s, low_s * draw.choice([1.5, 5.0, 20.0])),
        clock_s=draw.choice([0.0005, 0.002]),
        engine=replace(_engine(draw, faulty=bool(chosen)), flip_rate=flip_rate if chosen and checksum else 0.0),
        transfer_retries=draw.choice([0, 1, 1]),
        checksum=checksum,
        stages=stages,
    )
    options = _with_options_of_own_streams(seed, replace(options, **_drawn(later, _DATA["later"])))
    options = _with_returns(options, returns, resumes=with_returns)
    if has_ranks or stages[0] > 1:
        options = replace(options, host_pages=random.Random(f"{seed}/host tier").choice([0, 20, 200]))
    if has_ranks:
        options = replace(options, **_drawn(of_ranks, _DATA["ranks"]))
    options = _with_images(seed, _with_groups(seed, options))
    return _with_encoders(seed, options, strikes=faults is None)


def _drawn(draw: random.Random, draws: Mapping[str, Any]) -> dict[str, Any]:
    """One draw for each field, in this order: of a choice, or whether it is one of a share of seeds."""
    found = {name: draw.random() < of if isinstance(of, float) else draw.choice(of) for name, of in draws.items()}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _faults_of_parts(seed: int, *, followers: bool, returns: bool) -> tuple[str, ...]:
    """Kinds that strike what only some clusters have. `followers`: beside leaders; `returns`: of clients to their streams."""
    drawn: tuple[str, ...] = ()
    if followers and random.Random(f"{seed}/rank fault").random() < 0.5:
        drawn += ("kill rank",)
    if random.Random(f"{seed}/moves").random() < 0.5:
        drawn += ("migrate",)
    return (*drawn, "broken stream") if returns else drawn


def _with_options_of_own_streams(seed: int, options: Options) -> Options:
    of_decode = seed >= FIRST_WITH_TURNS and random.Random(f"{seed}/turns").random() < 0.7
    may_fetch = of_decode or (seed >= FIRST_WITH_PREFIXES and options.num_prefill > 1)
    return replace(
        options,
        num_tenants=random.Random(f"{seed}/tenants").choice([0, 0, 1, 2]),
        host_memory=random.Random(f"{seed}/rows").random() < 0.6,
        heartbeats=seed >= FIRST_WITH_HEARTBEATS and random.Random(f"{seed}/heartbeats").random() < 0.7,
        whole=random.Random(f"{seed}/whole").choice([0.0, 0.2, 0.5]) if seed >= FIRST_WITH_WHOLE else 0.0,
        prefix_fetch=may_fetch and random.Random(f"{seed}/prefixes").random() < 0.7,
        prefixes_of_decode=of_decode,
    )


def _with_returns(options: Options, draw: random.Random, *, resumes: bool) -> Options:
    """`resumes`: clients come again for their streams, to any of the routers."""
    return replace(
        options,
        num_routers=draw.choice([1, 2, 2]) if resumes else 1,
        resume_window_s=draw.choice([0.5, 3.0]) if resumes else 0.0,
        most_kept_bytes=draw.choice([2000, MAX_KEPT_BYTES, MAX_KEPT_BYTES]),
    )


def _with_groups(seed: int, options: Options) -> Options:
    """Of half the seeds from `FIRST_WITH_GROUPS` on the model remembers states, windows, or both, beside pages of all tokens."""
    draw = random.Random(f"{seed}/groups")
    if seed < FIRST_WITH_GROUPS or draw.random() < 0.5:
        return options
    states, windows = draw.choice([(True, False), (False, True), (True, True)])
    return replace(
        options,
        faults=tuple(kind for kind in options.faults if kind != "kill rank"),
        ranks=(1, 1),
        kv_units=1,
        stages=(1, 1),
        host_pages=0,
        prefix_fetch=options.prefix_fetch and seed >= FIRST_WITH_FETCHED_STATES,
        chunk=-(-options.chunk // GRID) * GRID if states else options.chunk,
        state_slots=(draw.choice([4, 8, 16]), draw.choice([2, 4, 10])) if states else (0, 0),
        window=draw.choice([1, 3, 6, 11]) if windows else 0,
        more_window_pages=draw.choice([0, 4, 20]),
    )


def _with_images(seed: int, options: Options) -> Options:
    """Of most seeds from `FIRST_WITH_IMAGES` on the model sees images. A stage gets what it sees from the one before, which is not simulated
    for several ranks of a later stage.
    """
    draw = random.Random(f"{seed}/images")
    later_ranks = any(ranks > 1 and stages > 1 for ranks, stages in zip(options.ranks, options.stages, strict=True))
    if seed < FIRST_WITH_IMAGES or later_ranks or draw.random() < 0.2:
        return options
    has_groups = options.window or options.state_slots != (0, 0)
    return replace(
        options,
        image_room=draw.choice([9, 12, 20, 60]),
        host_pages=0 if has_groups else draw.choice([options.host_pages, 20, 200]),
    )


def _with_encoders(seed: int, options: Options, *, strikes: bool) -> Options:
    """Of most seeds from `FIRST_WITH_ENCODERS` on, encoder workers compute what the model sees. Pools hold few of the images.

    `strikes`: faults of encoder workers are drawn, too.
    """
    draw = random.Random(f"{seed}/encoders")
    if seed < FIRST_WITH_ENCODERS or not options.image_room or options.stages[0] > 1 or draw.random() < 0.2:
        return options
    page = draw.choice([1, 2, 4])
    largest = -(-LARGEST_IMAGE // page)
    drawn = tuple(kind for kind in ENCODER_FAULTS if draw.random() < 0.6)
    return replace(
        options,
        faults=options.faults + drawn if strikes else options.faults,
        num_encode=draw.choice([1, 2, 3]),
        feature_page=page,
        feature_pages=(largest * draw.choice([1, 2, 5]), largest * draw.choice([1, 2, 5])),
        feature_rows=draw.choice([1, 3, 16]),
        feature_timeout_s=draw.choice([0.1, 0.5, 3.0]),
        encode_room=draw.choice([9, 20]),
    )


def _engine(draw: random.Random, *, faulty: bool) -> EngineBehaviour:
    low_s = draw.choice([0.0002, 0.002])
    rate = draw.choice([0.0, 0.05, 0.2]) if faulty else 0.0
    return EngineBehaviour(
        copy_s=(low_s, 4 * low_s),
        slow_rate=draw.choice([0.0, 0.1]) if faulty else 0.0,
        slow_s=draw.choice([0.2, 1.0, 3.0]),
        fail_rate=rate,
        late_done_rate=draw.choice([0.0, 0.02, 0.1]) if faulty else 0.0,
        late_rate=draw.choice([0.3, 0.9]),
        max_linger_s=draw.choice([0.5, 3.0]),
        connect_fail_rate=rate,
        fence_fail_rate=draw.choice([0.0, 0.3]) if faulty else 0.0,
        fence_s=draw.choice([0.01, 0.5]),
        settle_s=0.5,
        gives_up_s=draw.choice([0.5, 2.0]),
    )


# ---- scenario files: a run that once failed, with all its options written out, so that other draws of options do not change it

SCENARIOS = Path(__file__).with_name("scenarios")


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """`found`: how; `what`: went wrong, in which code; `fix`: in one line."""

    found: str
    what: str
    fix: str
    options: Options


def load_scenario(path: Path) -> Scenario:
    return msgspec.json.decode(path.read_bytes(), type=Scenario)


def scenario_paths() -> list[Path]:
    return sorted(SCENARIOS.glob("*.json"))
