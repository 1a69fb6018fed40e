"""PD multiplexing: prompts and decodes are steps of two lanes, which one device computes at the same time.

    prefill lane   | chunk 1 of A  | chunk 2 of A, B | chunk of E ...
    decode lane    | C D | C D | C D | C D | C D | A B C D | A B C D ...

Steps of one lane run in the order of their plans, steps of two lanes in any order. So a request has steps in flight in one lane only:
its prompt is computed in the prefill lane, and it changes to the decode lane once nothing of it is in flight. What an executor knows of
a row is its lane's: the request opens its row again where it goes, and closes it where it was (RequestTable). The lanes share the pages:
each is written by steps of the one request that holds it, and others read it once these steps have been collected.

Sources of the idea: both phases over one KV pool in Semi-PD (arXiv:2504.19867) and Bullet (arXiv:2504.19516), SGLang's --enable-pdmux,
and shares of a device for prefill and decode in MuxServe (arXiv:2404.02015).
"""

from enum import Enum


class Lane(Enum):
    """Where the steps of a plan run. A plan without a lane: there is one stream of steps."""

    PREFILL = "prefill"
    DECODE = "decode"


STREAMS = {Lane.DECODE: 0, Lane.PREFILL: 1}  # of an executor; steps without a lane run on the first
