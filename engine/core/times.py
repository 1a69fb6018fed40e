"""Stage times of a request, written by loop and role.

    unified   arrived -------------------- started -- first token -------- ended
              |        queue_time          | prefill_time | decode_time    |
    prefill   arrived ------- queued ----- started -- computed ----------- ended
              | bootstrap_time | queue_time | prefill_time | transfer_time |
    decode    arrived ------- queued (pages offered to prefill) ---- landed -- ended
              | bootstrap_time | queue_time, prefill_time, transfer_time | decode_time |

Stages sum to the total. Prefill's metadata row reports decode's queue_time and prefill_time; the
rest is transfer.
"""

from dataclasses import dataclass, field

from engine.messages import Stage

MAX_CHUNKS = 64  # stored per request: enough for a chart


@dataclass(slots=True)
class Times:
    """Worker clock seconds; `remote_*`: durations on prefill."""

    arrived_s: float | None = None
    queued_s: float | None = None
    started_s: float | None = None
    computed_s: float | None = None  # prefill: the last chunk is done, handover begins
    landed_s: float | None = None  # decode: KV and metadata have landed
    first_token_s: float | None = None
    chunks: list[tuple[float, int]] = field(default_factory=list)  # launch time, number of tokens
    chunk_ends_s: list[float] = field(default_factory=list)  # ends of `chunks`; the last ends with the prefill
    bootstraps: bool = False  # waits for its other half before it is queued
    remote: bool = False  # another worker computes its prompt
    remote_queue_s: float = 0.0
    remote_prefill_s: float = 0.0

    @property
    def queue_s(self) -> float:
        return _span(self.queued_s if self.queued_s is not None else self.arrived_s, self.started_s)

    @property
    def prefill_s(self) -> float:
        return _span(self.started_s, self.computed_s if self.computed_s is not None else self.first_token_s)


def time_line(times: Times, *, ended_s: float, completion_tokens: int) -> dict[str, float]:
    """Return an ended request's completed stages, seconds by name.

    `decode_throughput`: tokens per second after the first.
    """
    passed = [stage for stage in stages(times, ended_s=ended_s) if stage.name != "chunk"]
    if passed and passed[-1].name not in ("transfer", "decode"):
        del passed[-1]  # it ended within this one
    line: dict[str, float] = {}
    for stage in passed:
        seconds = stage.end_s - stage.start_s
        if stage.name == "transfer_queue":
            line |= {"queue_time": times.remote_queue_s, "prefill_time": times.remote_prefill_s}
            line["transfer_time"] = max(0.0, seconds - (times.remote_queue_s + times.remote_prefill_s))
        else:
            line[f"{stage.name}_time"] = seconds
    if times.arrived_s is not None and times.first_token_s is not None:
        line["first_token_latency"] = times.first_token_s - times.arrived_s
        decoding_s = ended_s - times.first_token_s
        if completion_tokens > 1 and decoding_s > 0:
            line["decode_throughput"] = (completion_tokens - 1) / decoding_s
    return line


def stages(times: Times, *, ended_s: float) -> list[Stage]:
    """Return the stages in order; chunks lie inside `prefill`.

    Decode's `transfer_queue` lasts from the page offer to landing.
    """
    first_s = times.queued_s if times.queued_s is not None else times.arrived_s
    if times.arrived_s is None or first_s is None:
        return []
    line = [] if times.queued_s is None else [Stage("bootstrap", times.arrived_s, times.queued_s)]
    if times.bootstraps and times.queued_s is None:
        return [Stage("bootstrap", times.arrived_s, ended_s)]
    if times.landed_s is not None:
        return [*line, Stage("transfer_queue", first_s, times.landed_s), Stage("decode", times.landed_s, ended_s)]
    if times.started_s is None or times.remote:
        return [*line, Stage("transfer_queue" if times.remote else "queue", first_s, ended_s)]
    line.append(Stage("queue", first_s, times.started_s))
    computed_s = times.computed_s if times.computed_s is not None else times.first_token_s
    line.append(Stage("prefill", times.started_s, ended_s if computed_s is None else computed_s))
    line += _chunks(times, line[-1].end_s)
    if times.computed_s is not None:
        line.append(Stage("transfer", times.computed_s, ended_s))
    elif times.first_token_s is not None:
        line.append(Stage("decode", times.first_token_s, ended_s))
    return line


def _chunks(times: Times, computed_s: float) -> list[Stage]:
    open_ends = [computed_s] * (len(times.chunks) - len(times.chunk_ends_s))
    ends = [*times.chunk_ends_s, *open_ends]
    return [Stage("chunk", start_s, end_s, num) for (start_s, num), end_s in zip(times.chunks, ends, strict=True)]


def _span(start_s: float | None, end_s: float | None) -> float:
    return 0.0 if start_s is None or end_s is None else end_s - start_s
