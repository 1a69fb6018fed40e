"""When one request passed from stage to stage. Plain state: the loop and the role write what they see; no clock here.

    unified   arrived -------------------- started -- first token -------- ended
              |        queue_time          | prefill_time | decode_time    |
    prefill   arrived ------- queued ----- started -- computed ----------- ended
              | bootstrap_time | queue_time | prefill_time | transfer_time |
    decode    arrived ------- queued (pages told to prefill) ---- landed -- ended
              | bootstrap_time | queue_time, prefill_time, transfer_time | decode_time |

The stages of a request partition its life, so their sum is the time that the engine had it. Of a decode worker's three
middle ones prefill tells the first two (in the metadata row); the rest of the wait is the transfer's.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Times:
    """Seconds of the worker's clock; None: not reached (yet). `remote_*`: durations on the prefill worker, in seconds."""

    arrived_s: float | None = None
    queued_s: float | None = None
    started_s: float | None = None
    computed_s: float | None = None  # prefill role: the last chunk is done, the hand-over begins
    landed_s: float | None = None  # decode role: KV and metadata are here
    first_token_s: float | None = None
    remote_queue_s: float = 0.0
    remote_prefill_s: float = 0.0

    @property
    def queue_s(self) -> float:
        """Waiting for the first step, after the bootstrap where there is one."""
        return _span(self.queued_s if self.queued_s is not None else self.arrived_s, self.started_s)

    @property
    def prefill_s(self) -> float:
        return _span(self.started_s, self.computed_s if self.computed_s is not None else self.first_token_s)


def time_line(times: Times, *, ended_s: float, completion_tokens: int) -> dict[str, float]:
    """The stages of an ended request by name, in seconds; a stage it did not reach is left out.

    `decode_throughput`: tokens a second after the first; `first_token_latency`: from arrival.
    """
    if times.arrived_s is None:
        return {}
    line = _stages(times, ended_s)
    if times.first_token_s is not None:
        line["first_token_latency"] = times.first_token_s - times.arrived_s
        decoding_s = ended_s - times.first_token_s
        if completion_tokens > 1 and decoding_s > 0:
            line["decode_throughput"] = (completion_tokens - 1) / decoding_s
    return line


def _stages(times: Times, ended_s: float) -> dict[str, float]:
    if times.landed_s is not None:
        remote = times.remote_queue_s + times.remote_prefill_s
        return {
            "bootstrap_time": _span(times.arrived_s, times.queued_s),
            "queue_time": times.remote_queue_s,
            "prefill_time": times.remote_prefill_s,
            "transfer_time": max(0.0, _span(times.queued_s, times.landed_s) - remote),
            "decode_time": ended_s - times.landed_s,
        }
    line = {} if times.queued_s is None else {"bootstrap_time": _span(times.arrived_s, times.queued_s)}
    if times.started_s is None:
        return line
    line["queue_time"] = times.queue_s
    if times.computed_s is not None:
        return {**line, "prefill_time": times.prefill_s, "transfer_time": ended_s - times.computed_s}
    if times.first_token_s is not None:
        return {**line, "prefill_time": times.prefill_s, "decode_time": ended_s - times.first_token_s}
    return line


def _span(start_s: float | None, end_s: float | None) -> float:
    return 0.0 if start_s is None or end_s is None else end_s - start_s
