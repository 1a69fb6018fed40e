"""A small fixed share of `make fuzz`: the same inputs each time. And how its report tells of what went wrong."""

import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from fastapi import Response
from hypothesis import Phase, settings

from engine.frontend.routes import APIS
from router.http import openapi as router_openapi
from service.http.api import ApiRouter, document
from service.http.request import HttpRequest
from tools.fuzz import bodies, sockets
from tools.fuzz.answers import Answers
from tools.fuzz.clients import clients
from tools.fuzz.parts import ROUND
from tools.fuzz.run import main
from tools.fuzz.story import Frames

ROOT = Path(__file__).parents[2]


def stories(count: int) -> list[bytes]:
    rng = random.Random(7)
    return [rng.randbytes(rng.randint(200, 1600)) for _ in range(count)]


def test_frames() -> None:
    frames = Frames()
    for data in stories(300):
        frames.run(data)
    assert frames.num_writes > 500 and frames.num_taken > 2000  # else it would prove little


@pytest.mark.parametrize("secret", [None, sockets.SECRET])
def test_frames_at_managers(secret: bytes | None) -> None:
    with closing(sockets.Target(secret)) as target:
        for data in stories(8):
            target.run(data)
        assert target.result() and target.num_inputs > 200
        assert target.prefill.counters["control_errors"] == target.decode.counters["control_errors"] == 0


@pytest.mark.parametrize("secret", [None, bodies.SECRET])
def test_bootstrap_bodies(secret: bytes | None) -> None:
    with bodies.called_server(secret) as caller:
        for data in stories(25):
            caller.run(data)
        assert caller.num_inputs > 500 and caller.statuses.keys() >= {200, 400, 404, 405} | ({401} if secret else set())


def test_answers() -> None:
    answers = Answers()
    for data in stories(60):
        answers.run(data)
    assert answers.num_inputs > 500 and answers.num_calls > 150  # else it would prove little


def test_a_crash_ends_the_run_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "fuzz.md"
    monkeypatch.setattr("transfer_backends.prefill.paths.PeerAdmission.refuse", lambda *args, **kwargs: 1 / 0)
    monkeypatch.setattr("tools.fuzz.parts.ROUND", settings(ROUND, phases=[Phase.generate]))
    monkeypatch.setattr("tools.fuzz.run._prepare", lambda: None)
    monkeypatch.setattr("sys.argv", ["fuzz", "--parts", "frames", "--inputs", "3000", "--report", str(page)])
    with pytest.raises(ZeroDivisionError) as caught:
        main()
    assert any("prefill reads" in note for note in caught.value.__notes__)
    assert "| FAILED | ZeroDivisionError" in page.read_text() and "Not complete: frames" in page.read_text()


def test_a_hang_ends_the_process_with_1_and_its_stacks() -> None:
    code = "import tools.fuzz.footprint as f, time; f.HANG_S = 0.1; f.note_life(); time.sleep(60)"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 1 and "Timeout" in ended.stderr and "<string>" in ended.stderr


async def never(request: HttpRequest) -> Response:
    raise AssertionError


def test_streams_are_described_by_their_events() -> None:
    """Found by `make fuzz`: the schema said that an event is a string; readers of OpenAPI 3.1 take it for each event."""
    generation = router_openapi.generation_routes(never, never)
    documents = [
        document(APIS, title="worker"),
        router_openapi.make_document((ApiRouter(router_openapi.GENERATION, generation),), None),
    ]
    for described in documents:
        content = described["paths"]["/generate"]["post"]["responses"]["200"]["content"]
        event = content["text/event-stream"]["schema"]
        assert event["type"] == "object" and event["properties"]["data"] == {"type": "string"}


def test_clients() -> None:
    with clients() as attack:
        for data in stories(10):
            attack.run(data)
        assert attack.num_inputs > 200 and attack.statuses.keys() >= {200, 400, 403, 404, 405, 413}
