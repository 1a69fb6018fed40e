"""Records for the dashboard. Times are monotonic seconds."""

import msgspec


class Second(msgspec.Struct):
    """Events of a second: latencies by bucket (recorder.py), `failures` by "role reason"."""

    at: int
    arrived: int = 0
    ended: int = 0
    failed: int = 0
    retried: int = 0
    ttft: dict[int, int] = msgspec.field(default_factory=dict)
    gaps: dict[int, int] = msgspec.field(default_factory=dict)
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    # Increases between reports, not summed, as all processes receive the same.
    prompt_tokens: int = 0
    output_tokens: int = 0
    kv_bytes: int = 0


class DashboardAttempt(msgspec.Struct):
    """One attempt. `answering`: decode, unified, or a prefill worker without decode."""

    started_s: float
    answering: str
    prefill: str | None = None
    prefill_ended_s: float | None = None
    failure: str = ""
    failed_s: float | None = None


class DashboardRequest(msgspec.Struct):
    """One request. `status`: 0 while running, 499 if its client left."""

    key: str  # unique among all processes
    request_id: str
    path: str
    started_s: float
    prompt_tokens: int  # estimated
    attempts: list[DashboardAttempt]
    first_byte_s: float | None = None
    last_byte_s: float | None = None
    num_events: int = 0  # chunks of a streamed answer
    ended_s: float | None = None
    status: int = 0
    failure: str = ""
    caller: str = ""  # name of its API key
    rooms: list[int] = []  # all its attempts'


class DashboardSnapshot(msgspec.Struct):
    """Records of one process. `switching`: URL -> new role."""

    seconds: list[Second]
    records: list[DashboardRequest]
    switching: dict[str, str] = {}
