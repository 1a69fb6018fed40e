"""Names of requests (`rid`) belong to the key that gave them: no other key ends, blocks or moves what it did not name."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.http.guard import CALLER_HEADER, NO_KEY
from service.security.keys import bearer, owner_of
from tests.frontend.conftest import Worker, start_worker, wait_for
from tests.router.dummies import cluster, key_file

ONE, TWO = owner_of("Bearer one"), owner_of("Bearer two")
SLOW = {"text": "SLOW", "stream": True, "sampling_params": {"max_new_tokens": 50}}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("keyed")
    with start_worker(
        folder, server={"api_key_file": key_file(folder, "one", "two"), "admin_api_key": "r00t-key"}
    ) as worker:
        yield worker


@pytest.fixture(scope="module")
def without_admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("without")
    with start_worker(folder, server={"api_key_file": key_file(folder, "one", "two")}) as worker:
        yield worker


@pytest.fixture(scope="module")
def open_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with start_worker(tmp_path_factory.mktemp("open")) as worker:
        yield worker


def abort(worker: Worker, rid: str, **headers: str) -> None:
    assert worker.post("/abort_request", {"rid": rid}, headers=headers).status_code == 200


class Running:
    """Streams that last until they are aborted, all of the name "mine"."""

    def __init__(self, worker: Worker, *callers: dict[str, str], body: dict[str, Any] = SLOW) -> None:
        self._worker, self._callers, self._body = worker, callers, body

    def __enter__(self) -> "Running":
        for number, caller in enumerate(self._callers, 1):
            stream = self._worker.http.stream("POST", "/generate", json={**self._body, "rid": "mine"}, headers=caller)
            response = stream.__enter__()
            assert response.status_code == 200, response.read()
            self._streams = [*getattr(self, "_streams", []), stream]
            wait_for(lambda number=number: self._worker.scheduler.num_running == number)  # type: ignore[misc]
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.__exit__(None, None, None)
        self._worker.wait_idle()

    @property
    def num_left(self) -> int:
        return int(self._worker.scheduler.num_running)

    def falls_to(self, count: int) -> None:
        wait_for(lambda: self.num_left == count)


@pytest.mark.parametrize("name", ["keyed", "without_admin"])
def test_a_key_ends_its_own_request_alone(request: pytest.FixtureRequest, name: str) -> None:
    """Two keys use the same name at once: neither blocks the other."""
    worker = request.getfixturevalue(name)
    with Running(worker, bearer("one"), bearer("two")) as running:
        refused = worker.post("/generate", {"text": "a", "rid": "mine"}, headers=bearer("two"))
        assert refused.status_code == 400 and "'mine' is running" in refused.text
        abort(worker, "mine", **bearer("two"))
        running.falls_to(1)
        abort(worker, "mine", **bearer("two"))
        assert worker.post("/generate", {"text": "a", "rid": "mine"}, headers=bearer("two")).status_code == 200
        assert running.num_left == 1
        abort(worker, "mine", **bearer("one"))
        running.falls_to(0)


def test_an_admin_key_ends_requests_of_all_keys(keyed: Worker) -> None:
    with Running(keyed, bearer("one"), bearer("two")) as running:
        abort(keyed, "mine", **bearer("r00t-key"))
        running.falls_to(0)


def test_without_keys_names_are_everybody_s(open_worker: Worker) -> None:
    """Clients send keys that no one asked for."""
    with Running(open_worker, bearer("EMPTY")) as running:
        assert open_worker.post("/generate", {"text": "a", "rid": "mine"}).status_code == 400
        abort(open_worker, "mine", **bearer("other"))
        running.falls_to(0)


def test_behind_a_router_names_are_of_its_clients_keys(keyed: Worker, open_worker: Worker) -> None:
    """All come with the router's key, or with none."""
    for worker, shown in ((keyed, bearer("one")), (open_worker, {})):
        one, two, none = ({**shown, CALLER_HEADER: owner} for owner in (ONE, TWO, NO_KEY))
        with Running(worker, one, two, none) as running:
            abort(worker, "mine", **two)
            running.falls_to(2)
            abort(worker, "mine", **none)
            running.falls_to(1)
            abort(worker, "mine", **two)
            assert worker.post("/generate", {"text": "a", "rid": "mine"}, headers=two).status_code == 200
            assert running.num_left == 1
            abort(worker, "mine", **(bearer("r00t-key") if shown else {}))
            running.falls_to(0)


@pytest.mark.parametrize("owner", ["", "x", "*", "0" * 63, "0" * 65, ONE.upper(), "g" * 64])
def test_what_is_no_digest_names_no_owner(keyed: Worker, owner: str) -> None:
    for path, body in (
        ("/generate", {"text": "a"}),
        ("/abort_request", {"rid": "x"}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        answer = keyed.post(path, body, headers={**bearer("one"), CALLER_HEADER: owner})
        assert answer.status_code == 400 and CALLER_HEADER in answer.text


def test_embeddings_and_stored_responses_have_names_of_their_key(keyed: Worker) -> None:
    body = {"model": "tiny", "input": "SLOW", "stream": True, "max_output_tokens": 50}
    with keyed.http.stream("POST", "/v1/responses", json=body, headers=bearer("one")) as response:
        text = ""
        chunks = response.iter_text()
        while (found := re.search(r'"id":"(resp_\w+)"', text)) is None:
            text += next(chunks)
        wait_for(lambda: keyed.scheduler.num_running == 1)
        path = f"/v1/responses/{found[1]}/cancel"
        assert keyed.post(path, {}, headers=bearer("two")).status_code == 404
        abort(keyed, found[1], **bearer("two"))
        assert keyed.scheduler.num_running == 1
        assert keyed.post(path, {}, headers=bearer("one")).status_code == 200
    keyed.wait_idle()


async def test_a_router_says_whose_a_name_is_and_shows_an_admin_s_key(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"api_key_file": key_file(tmp_path, "one", "two"), "admin_api_key": "r00t-key"}
    async with cluster(**flags, worker_api_key="the-router-s", worker_admin_api_key="wroot") as c:
        for key, owner in (("one", ONE), ("two", TWO)):
            headers = {**bearer(key), CALLER_HEADER: "0" * 64}
            assert (await c.post("/generate", {"text": "a", "rid": "mine"}, headers=headers))[0] == 200
            assert {w.seen[-1].headers[CALLER_HEADER.lower()] for w in (c.prefills[0], c.decodes[0])} == {owner}
            assert (await c.post("/abort_request", {"rid": "mine"}, headers=headers))[0] == 200
            assert c.decodes[0].aborts[-1] == ("Bearer the-router-s", owner)
        assert (await c.post("/abort_request", {"rid": "mine"}, headers=bearer("r00t-key")))[0] == 200
        assert c.decodes[0].aborts[-1] == ("Bearer wroot", None)
    async with cluster() as c:
        assert (await c.post("/generate", {"text": "a"}, headers=bearer("EMPTY")))[0] == 200
        assert c.decodes[0].seen[-1].headers[CALLER_HEADER.lower()] == NO_KEY
        assert (await c.post("/abort_request", {"rid": "mine"}, headers=bearer("other")))[0] == 200
        assert c.decodes[0].aborts[-1] == ("Bearer other", NO_KEY)
