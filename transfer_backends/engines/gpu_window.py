"""Engine limits for NVLink's 400 GB/s, where a CPU-sized window lasts only 0.2 ms."""

from dataclasses import replace

from transfer_backends.contract import Caps


def of_gpu(caps: Caps, *, inside_machine: str) -> Caps:
    return replace(
        caps,
        max_inflight_bytes=1 << 30,
        max_post_bytes=128 << 20,
        max_piece_bytes=64 << 20,
        full_window_s=0.0,
        longest_nap_s=0.0001,
        inside_machine=inside_machine,
    )
