"""Bytes delivered by this process's TCP sockets: evidence of a write's transport."""

import contextlib
import os
import socket
import stat
import struct

BYTES_ACKED = struct.Struct("=Q")
AT = 120  # of tcpi_bytes_acked in struct tcp_info (linux/tcp.h, since Linux 4.1)


def tcp_bytes_acked() -> dict[int, int] | None:
    """Return acknowledged bytes per socket inode, or None if unknown."""
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return None
    found: dict[int, int] = {}
    for number in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile, or not TCP
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(number)) as copy:
                    found[status.st_ino] = _acked(copy)
    return found


def _acked(opened: socket.socket) -> int:
    if opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type != socket.SOCK_STREAM:
        raise OSError("not a TCP socket")
    info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, AT + BYTES_ACKED.size)
    if len(info) < AT + BYTES_ACKED.size:
        raise OSError("a kernel older than the field")
    return int(BYTES_ACKED.unpack_from(info, AT)[0])
