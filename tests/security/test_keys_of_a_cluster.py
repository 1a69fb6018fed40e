"""Keys of a whole cluster, as `tandem up` starts it, over real HTTP: rotation while requests run."""

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.e2e.client import session
from tests.e2e.cluster import SHIPPED, Cluster, cluster, wait_until

OLD, NEW, ADMIN = "old-client-key", "new-client-key", "the-admins-key"
TAKEN_S = 60.0
NUM_ASKING = 3


@dataclass(frozen=True)
class Guarded:
    cluster: Cluster
    keys: Path

    @property
    def doors(self) -> list[str]:
        """Router and workers."""
        return [self.cluster.router, *(worker.url for worker in self.cluster.workers)]

    def rotate(self, *keys: str) -> None:
        """By rename, as docs/security.md says."""
        fresh = self.keys.with_suffix(".fresh")
        fresh.write_text("".join(f"{key}\n" for key in keys))
        fresh.chmod(0o600)
        os.replace(fresh, self.keys)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    keys, admin = tmp_path / "api.keys", tmp_path / "admin.keys"
    for file, key in ((keys, OLD), (admin, ADMIN)):
        file.write_text(f"{key}\n")
        file.chmod(0o600)
    given = ("--api-key-file", str(keys), "--admin-api-key-file", str(admin))
    with cluster(tmp_path / "up", "--health-check-interval-secs", "0.1", *given, *SHIPPED) as c:
        yield Guarded(c, keys)


def ask(method: str, url: str, key: str | None, body: dict[str, Any] | None = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.request(method, url, json=body, headers=headers, timeout=30.0)


def test_rotation_disturbs_no_client_with_the_new_key(guarded: Guarded) -> None:
    """Old key alone, both, new key alone. Who asks all the time, and changes keys while both are valid, sees only 200."""
    url = f"{guarded.cluster.router}/generate"
    assert ask("POST", url, NEW, prompt()).status_code == 401

    def all_say(status: int, key: str) -> bool:
        return all(ask("GET", f"{door}/v1/models", key).status_code == status for door in guarded.doors)

    async def rotate_under_load() -> list[int]:
        current, over, seen = [OLD], asyncio.Event(), list[int]()
        clients = [asyncio.create_task(keep_asking(url, current, seen, over)) for _ in range(NUM_ASKING)]
        stream = asyncio.create_task(one_stream(url, OLD))
        guarded.rotate(OLD, NEW)
        await asyncio.to_thread(wait_until, lambda: all_say(200, NEW), within_s=TAKEN_S, what="the new key is valid")
        assert all_say(200, OLD)
        current[0] = NEW
        guarded.rotate(NEW)
        await asyncio.to_thread(wait_until, lambda: all_say(401, OLD), within_s=TAKEN_S, what="the old key is refused")
        over.set()
        await asyncio.gather(*clients)
        assert await stream == 200  # it began with the old key, when that was valid
        return seen

    seen = asyncio.run(rotate_under_load())
    assert len(seen) > NUM_ASKING and set(seen) == {200}
    assert ask("POST", url, OLD, prompt()).status_code == 401
    answer = ask("POST", url, ADMIN, prompt())
    assert answer.status_code == 200, (answer.text, answer.headers)


def prompt(new: int = 2) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    return {"input_ids": list(range(20, 30)), "sampling_params": sampling}


async def keep_asking(url: str, current: list[str], seen: list[int], over: asyncio.Event) -> None:
    """With the key that is current when a request begins; one that began with the old key may meet its end."""
    async with session() as http:
        while not over.is_set():
            key = current[0]
            async with http.post(url, json=prompt(), headers={"Authorization": f"Bearer {key}"}) as response:
                await response.read()
                if key == current[0]:
                    seen.append(response.status)


async def one_stream(url: str, key: str) -> int:
    async with session() as http:
        headers = {"Authorization": f"Bearer {key}"}
        async with http.post(url, json={**prompt(400), "stream": True}, headers=headers) as response:
            text = (await response.read()).decode()
    last = json.loads(text.strip().removesuffix("data: [DONE]").strip().rpartition("data: ")[2])
    assert len(last["output_ids"]) == 400, last
    return response.status
