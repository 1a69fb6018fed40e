"""What the dashboard remembers, as the processes of a router exchange it. Times: the machine's monotonic clock, in seconds."""

import msgspec


class Second(msgspec.Struct):
    """The events of one second. Latencies are counts by bucket (recorder.py); `failures` are counts by "role reason"."""

    at: int
    arrived: int = 0
    ended: int = 0
    failed: int = 0
    retried: int = 0
    ttft: dict[int, int] = msgspec.field(default_factory=dict)
    gaps: dict[int, int] = msgspec.field(default_factory=dict)
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    # What workers counted since their last report: every process receives the same, so these are not added up.
    prompt_tokens: int = 0
    output_tokens: int = 0
    kv_bytes: int = 0


class DashboardAttempt(msgspec.Struct):
    """One try of a request. `answering`: the decode (or unified) worker, or the prefill worker where it answers alone."""

    started_s: float
    answering: str
    prefill: str | None = None
    prefill_ended_s: float | None = None
    failure: str = ""
    failed_s: float | None = None


class DashboardRequest(msgspec.Struct):
    """One request as the router saw it. `status` 0: it runs; 499: its client went away. `failure`: "": none."""

    key: str  # unique among all processes
    request_id: str
    path: str
    started_s: float
    prompt_tokens: int  # as the router estimates them
    attempts: list[DashboardAttempt]
    first_byte_s: float | None = None
    last_byte_s: float | None = None
    num_events: int = 0  # pieces in which a streamed answer went out
    ended_s: float | None = None
    status: int = 0
    failure: str = ""
    caller: str = ""  # the name of the key that sent it
    rooms: list[int] = []  # of all its attempts


class DashboardSnapshot(msgspec.Struct):
    """The records of one process. `switching`: workers that it moves to another role, by URL."""

    seconds: list[Second]
    records: list[DashboardRequest]
    switching: dict[str, str] = {}
