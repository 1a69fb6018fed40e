"""Long bodies in the router: read, inflated, taken apart and hashed beside its event loop, and bounded."""

import gzip
import io
import json
import threading
from typing import Any

import pytest

from router.choice.chooser import Chooser
from router.http import any_worker
from router.requests import dispatch, images, responses
from router.requests.reconnect import Reconnect
from service.http.json_bounds import MOST_FIELDS, MOST_PARTS
from tests.router.dummies import Cluster, cluster

TEXT = "k17 " * 100_000
COMPLETE = "/v1/completions"


def noted(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """The threads of its calls."""
    found, work = list[str](), getattr(owner, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        found.append(threading.current_thread().name)
        return work(*args, **kwargs)

    patch.setattr(owner, name, noting)
    return found


async def both(c: Cluster, path: str, body: dict[str, Any], field: str) -> None:
    """Post the body as it is, then with a long text in that field."""
    for text in ("k17", TEXT):
        status, _, answer = await c.post(path, {**body, field: text})
        assert status == 200, answer


async def test_a_thread_works_on_long_bodies_and_the_loop_on_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = noted(monkeypatch, dispatch, "parse_body")
    names = noted(monkeypatch, dispatch, "invoked_path")
    hints = noted(monkeypatch, Chooser, "hints_of")
    digests = noted(monkeypatch, Reconnect, "note")
    asked = noted(monkeypatch, any_worker, "decode_or_none")
    stored = noted(monkeypatch, responses, "with_fields")
    async with cluster(unified=1, policy="cache_aware", resume_window_s=7.0) as c:
        await both(c, COMPLETE, {"model": "m"}, "prompt")
        await both(c, "/tokenize", {"model": "m"}, "prompt")
        await both(c, "/v1/responses", {"model": "m", "previous_response_id": None}, "input")
        await both(c, "/invocations", {"model": "m"}, "prompt")
    for found in (reads, names, hints, digests, asked, stored):
        kinds = [name.startswith("bodies") for name in found]
        assert kinds == [False, True] * (len(kinds) // 2) and kinds, found


async def test_long_images_are_found_and_hashed_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    found, hashed = (noted(monkeypatch, images, name) for name in ("_found", "_digest"))
    async with cluster(unified=1) as c:
        for url in ("data:image/png;base64,aaaa", "data:image/png;base64," + "a" * 200_000):
            part = {"type": "image_url", "image_url": {"url": url}}
            await c.post("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": [part]}]})
    assert [name.startswith("bodies") for name in (*found, *hashed)] == [False, True] * 2


async def test_bodies_that_hold_too_much_reach_no_worker() -> None:
    async with cluster(unified=1) as c:
        bomb = gzip.compress(json.dumps({"model": "m", "prompt": "a" * 45_000_000}).encode())
        for body, headers, wanted, said in (
            (bomb, {"Content-Encoding": "gzip"}, 413, b"inflates to more than"),
            (json.dumps({"prompt": [[]] * MOST_PARTS}).encode(), {}, 413, b"lists, objects and texts"),
            (json.dumps(dict.fromkeys(map(str, range(MOST_FIELDS + 1)), 1)).encode(), {}, 400, b"1025 fields"),
        ):
            sent = {"Content-Type": "application/json", **headers}
            async with c.client.post(c.url + COMPLETE, data=io.BytesIO(body), headers=sent) as response:
                status, answer = response.status, await response.read()
            assert status == wanted and said in answer
        whole = {"model": "m", "prompt": "k17 v42"}
        await c.post(COMPLETE, gzip.compress(json.dumps(whole).encode()), headers={"Content-Encoding": "gzip"})
        (seen,) = c.decodes[0].seen
        assert seen.body == whole and "content-encoding" not in seen.headers
