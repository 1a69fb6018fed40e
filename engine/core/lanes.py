"""PD multiplexing: prefill and decode steps run in two lanes of one device, concurrently.

    prefill lane   | chunk 1 of A  | chunk 2 of A, B | chunk of E ...
    decode lane    | C D | C D | C D | C D | C D | A B C D | A B C D ...

Steps run in plan order within a lane only. So a request changes to decode once nothing of it is in
flight: it opens an executor row in the new lane and closes the old one (RequestTable). Lanes share
pages: only steps of the holder write them, and others read them after these are collected.

Both phases over one KV pool: Semi-PD (arXiv:2504.19867), Bullet (arXiv:2504.19516), SGLang's
--enable-pdmux; shares of a device: MuxServe (arXiv:2404.02015).
"""

from enum import Enum


class Lane(Enum):
    """Lane of a plan's steps, if there are two."""

    PREFILL = "prefill"
    DECODE = "decode"


STREAMS = {Lane.DECODE: 0, Lane.PREFILL: 1}  # of an executor; steps without a lane run on the first
