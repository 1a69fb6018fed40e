"""Parts of features: a request does not pay for those that it does not use."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from tests.packages import ROOT
from tests.router.dummies import CHAT, CHAT_PATH, STREAM, cluster

ROUTER = str(ROOT / "router")
OTHERS = ("on_info", "on_gone", "__init__")  # what a worker's reports call, whatever is asked
FEATURES = ("parts/encoders.py", "parts/images.py", "parts/prefix.py", "parts/reconnect.py", "requests/merge.py", "requests/responses.py")  # fmt: skip


@contextmanager
def entered() -> Iterator[set[str]]:
    """The files of router/ whose functions are called meanwhile, and these."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROUTER) and code.co_name not in OTHERS:
            found.add(code.co_filename.removeprefix(ROUTER + "/"))

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_a_plain_chat_enters_no_feature_that_it_does_not_use(body: dict[str, Any]) -> None:
    async with cluster(policy="least_load") as c:
        assert (await c.post(CHAT_PATH, body))[0] == 200
        with entered() as files:
            assert (await c.post(CHAT_PATH, body))[0] == 200
    assert {"requests/dispatch.py", "requests/answer.py", "attempts/pair_attempt.py"} <= files
    assert not [file for file in files if file.startswith(FEATURES)]
