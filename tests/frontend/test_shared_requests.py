"""Live requests of several frontends: real processes, real locks."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.frontend.client.dp_policy import RankLoad
from engine.frontend.client.scheduler_link import SharedRequests

OTHER = """
import sys
from engine.frontend.client.scheduler_link import SharedRequests
shared = SharedRequests(sys.argv[1], row=1, num_rows=2)
for line in sys.stdin:
    act, name = line.split()
    print(getattr(shared, act)(int(name) if act == "publish" else name), shared.num_live, flush=True)
"""


def test_a_name_has_one_owner_until_it_is_released_or_its_owner_ends(tmp_path: Path) -> None:
    mine = SharedRequests(str(tmp_path), row=0, num_rows=2)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:

        def ask(line: str) -> str:
            assert other.stdin is not None and other.stdout is not None
            other.stdin.write(line + "\n")
            other.stdin.flush()
            return other.stdout.readline().strip()

        assert mine.claim("a") and ask("claim a") == "False 0"
        assert ask("release a") == "None 0" and ask("claim a") == "False 0"  # only its owner gives it back
        mine.release("a")
        assert ask("claim a") == "True 0" and not mine.claim("a") and mine.claim("b")
        mine.publish(3)
        assert ask("publish 4") == "None 7" and mine.num_live == 7
        mine.publish(0)
        assert mine.num_live == 4
        other.kill()
        other.wait()
        assert mine.claim("a")
    mine.close()


def test_loads_of_a_rank_add_up_over_frontends(tmp_path: Path) -> None:
    first, second = (SharedRequests(str(tmp_path), row=row, num_rows=2, num_ranks=3) for row in range(2))
    first.publish(1, rank=0, num_tokens=10)
    first.publish(2, rank=2, num_tokens=20)
    second.publish(4, rank=2, num_tokens=40)
    assert first.loads() == second.loads() == [RankLoad(1, 10), RankLoad(), RankLoad(6, 60)]
    assert first.num_live == 7
    second.publish(0, rank=2)
    assert first.loads()[2] == RankLoad(2, 20)
    for shared in (first, second):
        shared.close()


@pytest.mark.parametrize("name", ["x" * 256, "\ud800", "\0", ""])
def test_any_name_can_be_claimed(name: str, tmp_path: Path) -> None:
    shared = SharedRequests(str(tmp_path), row=0, num_rows=1)
    assert shared.claim(name)
    shared.release(name)
    shared.close()
