"""What a prefill worker takes from the header in which a router names another worker: a real frontend, a scheduler stand-in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.messages import PrefixSource
from service.http.prefix_source import PREFIX_HEADER, PrefixSourceHeader, write_header
from tests.frontend.conftest import SECRET, Worker, start_worker

META = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 5, "bootstrap_room": 7}
SOURCE = PrefixSourceHeader(control="10.0.0.1:5000", incarnation="p1", num_tokens=4096)


@pytest.fixture(scope="module")
def prefill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    args: Any = {"mode": "prefill", "allowed": ["10.0.0.1"], "secret": SECRET.decode()}
    with start_worker(tmp_path_factory.mktemp("prefill"), **args) as worker:
        yield worker


def seen(worker: Worker, header: str | None, path: str = "/v1/completions", **body: Any) -> list[PrefixSource | None]:
    """What the scheduler is told, of each sample."""
    headers = {} if header is None else {PREFIX_HEADER: header}
    return [request.prefix_source for request in worker.sent(path, {**META, **body}, headers=headers)]


def test_the_scheduler_gets_the_source(prefill: Worker) -> None:
    told, header = PrefixSource(SOURCE.control, "p1", 4096), write_header(SOURCE, SECRET)
    assert seen(prefill, header, prompt="abc") == [told]
    messages = [{"role": "user", "content": "abc"}]
    assert seen(prefill, header, "/v1/chat/completions", messages=messages, max_tokens=1) == [told]
    assert seen(prefill, header, "/generate", text="abc", sampling_params={"max_new_tokens": 1}) == [told]


def test_only_samples_of_the_first_prompt_get_the_source(prefill: Worker) -> None:
    told = PrefixSource(SOURCE.control, "p1", 4096)
    assert seen(prefill, write_header(SOURCE, SECRET), prompt=["abc", "abd"], n=2) == [told, told, None, None]


@pytest.mark.parametrize("header", [None, "", "-", "- {}", "nonsense", '- {"control": "10.0.0.1:5000"}'])
def test_what_no_router_writes_is_ignored(prefill: Worker, header: str | None) -> None:
    assert seen(prefill, header, prompt="abc") == [None]


@pytest.mark.parametrize("control", ["10.0.0.1", "nonsense", "10.0.0.1:x"])
def test_what_is_no_address_is_not_dialled(prefill: Worker, control: str) -> None:
    source = PrefixSourceHeader(control=control, incarnation="p1", num_tokens=9)
    assert seen(prefill, write_header(source, SECRET), prompt="abc") == [None]


def test_without_a_secret_no_header_is_a_router_s(tmp_path: Path) -> None:
    with start_worker(tmp_path, mode="prefill", allowed=["10.0.0.1"]) as worker:
        text = write_header(SOURCE, SECRET).partition(" ")[2]
        for header in (f"- {text}", write_header(SOURCE, SECRET)):
            assert seen(worker, header, prompt="abc") == [None]


def test_other_roles_get_no_prefixes(worker: Worker) -> None:
    assert seen(worker, write_header(SOURCE, SECRET), prompt="abc") == [None]
