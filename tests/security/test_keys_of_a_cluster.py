"""Keys of a whole cluster, as `tandem up` starts it, over real HTTP: who may load adapters, and rotation while requests run."""

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
from tests.e2e.cluster import Cluster, cluster, wait_until
from tests.lora.tiny_adapters import make_tiny_adapter
from tests.models.tiny_checkpoints import make_tiny_checkpoint

OLD, NEW, ADMIN = "old-client-key", "new-client-key", "the-admins-key"
TAKEN_S = 60.0
NUM_ASKING = 3
COMMON = ("--max-total-tokens", "4096", "--chunked-prefill-size", "64", "--log-level", "warning")


@dataclass(frozen=True)
class Guarded:
    cluster: Cluster
    keys: Path
    adapter: Path

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


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    base = make_tiny_checkpoint(folder / "base", "qwen3")
    first, second = (make_tiny_adapter(folder / name, base, seed=i) for i, name in enumerate(("one", "two"), 1))
    keys, admin = folder / "api.keys", folder / "admin.keys"
    for file, key in ((keys, OLD), (admin, ADMIN)):
        file.write_text(f"{key}\n")
        file.chmod(0o600)
    given = ("--api-key-file", str(keys), "--admin-api-key-file", str(admin))
    lora = ("--lora-paths", f"one={first}", "--max-loras-per-batch", "2", "--max-loaded-loras", "2")
    args = ("--model-path", str(base), "--health-check-interval-secs", "0.1", *given, *lora, *COMMON)
    with cluster(folder / "up", *args) as c:
        yield Guarded(c, keys, Path(second))


def ask(method: str, url: str, key: str | None, body: dict[str, Any] | None = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.request(method, url, json=body, headers=headers, timeout=30.0)


def test_adapters_are_the_admin_s(guarded: Guarded) -> None:
    """At the router and at each worker: no key and a wrong one 401, a client's 403 and nothing changes, the admin's works."""
    asked: list[tuple[str, dict[str, str], set[str]]] = [  # and the adapters that are left then
        ("/load_lora_adapter", {"lora_name": "two", "lora_path": str(guarded.adapter)}, {"one", "two"}),
        ("/unload_lora_adapter", {"lora_name": "one"}, {"two"}),
    ]
    for door in guarded.doors:
        for path, body, _ in asked:
            answers = [ask("POST", door + path, key, body) for key in (None, "wrong", f"{ADMIN}x", OLD)]
            assert [answer.status_code for answer in answers] == [401, 401, 401, 403], (door, path)
            assert answers[-1].json()["error"]["code"] == "admin_key_needed"
            assert not [answer for answer in answers if ADMIN in answer.text]
    assert models(guarded, OLD) == {"one"}
    for path, body, left in asked:
        answer = ask("POST", guarded.cluster.router + path, ADMIN, body)
        assert answer.status_code == 200, answer.text
        assert models(guarded, OLD) == left


def models(guarded: Guarded, key: str) -> set[str]:
    """The adapters that every worker and the router have."""
    found = []
    for door in guarded.doors:
        rows = ask("GET", f"{door}/v1/models", key).json()["data"]
        found.append({row["id"] for row in rows if row.get("parent")})
    assert all(one == found[0] for one in found), found
    return found[0]


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
