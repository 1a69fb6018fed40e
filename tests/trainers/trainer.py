"""A trainer in a process of its own, which opens a group as SGLang's `init_custom_process_group` does.

    python -m tests.trainers.trainer WORLD_SIZE GROUP FILE

It prints the port of its store, then "open" when all members are there. It reads lines of tensor names, broadcasts these tensors of the
safetensors FILE, and prints "sent". It ends at end of file.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from engine.messages import JoinTrainer, NewTensors

GROUP = "weight_update_group"
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Trainer:
    process: "subprocess.Popen[str]"
    port: int
    world_size: int
    path: Path

    def join(self, **more: object) -> JoinTrainer:
        """The message with which a worker joins."""
        own = {"rank_offset": 1, "world_size": self.world_size, "backend": "gloo", **more}
        return JoinTrainer("join", GROUP, HOST, self.port, **own)  # type: ignore[arg-type]

    def tensors(self, names: Sequence[str]) -> NewTensors:
        """What a worker is told of a broadcast."""
        found = load_file(self.path)
        dtypes = [str(found[name].dtype).removeprefix("torch.") for name in names]
        return NewTensors(group=GROUP, names=list(names), dtypes=dtypes, shapes=[list(found[n].shape) for n in names])

    def send(self, names: Sequence[str]) -> None:
        """Begin to broadcast."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(names) + "\n")
        self.process.stdin.flush()

    def await_line(self, text: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == text

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def trainer(checkpoint: str, *, ranks: int = 1) -> Iterator[Trainer]:
    """A trainer with the tensors of `checkpoint`, for workers of so many ranks."""
    path = Path(checkpoint) / "model.safetensors"
    command = [sys.executable, "-m", "tests.trainers.trainer", str(1 + ranks), GROUP, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Trainer(process, int(process.stdout.readline()), 1 + ranks, path)
        finally:
            process.kill()


def main(world_size: int, name: str, file: str) -> None:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

    tensors = load_file(file)
    store = dist.TCPStore(HOST, 0, world_size, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    prefixed = dist.PrefixStore(name, store)
    own = {"group_name": name, "timeout": dist.constants.default_pg_timeout}
    group, _ = _new_process_group_helper(world_size, 0, [], Backend("gloo"), prefixed, **own)
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    print("open", flush=True)
    for line in sys.stdin:
        for tensor in line.split():
            dist.broadcast(tensors[tensor], src=0, group=group)
        print("sent", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
