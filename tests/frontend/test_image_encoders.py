"""What a worker takes from the header in which a router names encoder workers: a real frontend, a scheduler stand-in."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.messages import FeatureSource
from service.http.image_encoders import ENCODERS_HEADER, ImageEncoder, write_header
from tests.frontend.conftest import SECRET, Worker, start_worker
from tests.frontend.vision import base64_of, file_of, picture, url_of, write_vision_checkpoint

META = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 5, "bootstrap_room": 7}
ONE, TWO = ImageEncoder("10.0.0.1:5000", "e1"), ImageEncoder("10.0.0.1:5001", "e2")
FOUR, SIX = file_of(picture(56, 56, seed=4)), file_of(picture(84, 56, seed=6))

Told = list[list[str | None]]


@contextmanager
def started(folder: Path, mode: str) -> Iterator[Worker]:
    write_vision_checkpoint(folder / "tiny")
    with start_worker(folder, mode=mode, allowed=["10.0.0.1"], secret=SECRET.decode()) as worker:
        yield worker


@pytest.fixture(scope="module", params=["null", "prefill"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with started(tmp_path_factory.mktemp(request.param), request.param) as worker:
        yield worker


def told(worker: Worker, path: str, body: dict[str, Any], header: str | None) -> Told:
    """The incarnations of encoders that the scheduler is told of, for each sample."""
    requests = worker.sent(path, {**META, **body}, headers={} if header is None else {ENCODERS_HEADER: header})
    assert all(one is None or one.control in (ONE.control, TWO.control) for r in requests for one in r.encoders)
    return [[None if one is None else one.incarnation for one in r.encoders] for r in requests]


def chat(worker: Worker, header: str | None, *files: bytes, n: int = 1) -> Told:
    parts = [{"type": "image_url", "image_url": {"url": url_of(file)}} for file in files]
    body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "a"}]}], "max_tokens": 1, "n": n}
    return told(worker, "/v1/chat/completions", body, header)


def test_each_image_has_its_encoder(seeing: Worker) -> None:
    header = write_header([ONE, None], SECRET)
    assert chat(seeing, header, FOUR, SIX, n=2) == [["e1", None]] * 2
    assert seeing.scheduler.seen[-1].encoders[0] == FeatureSource(ONE.control, "e1")


def test_images_of_several_prompts_are_counted_through_the_body(seeing: Worker) -> None:
    body = {
        "text": ["a<|image_pad|>", "b", "c<|image_pad|><|image_pad|>"],
        "image_data": [[base64_of(FOUR)], [], [base64_of(FOUR), base64_of(SIX)]],
        "sampling_params": {"max_new_tokens": 1, "n": 2},
    }
    header = write_header([ONE, TWO, None], SECRET)
    assert told(seeing, "/generate", body, header) == [["e1"]] * 2 + [[]] * 2 + [["e2", None]] * 2


def test_images_that_the_router_did_not_count_have_the_last_encoder(seeing: Worker) -> None:
    assert chat(seeing, write_header([ONE, TWO], SECRET), FOUR, SIX, FOUR) == [["e1", "e2", "e2"]]


@pytest.mark.parametrize(
    "header", [None, "", "- {}", "nonsense", write_header([], SECRET), write_header([ONE], b"another")]
)
def test_what_no_router_writes_names_none(seeing: Worker, header: str | None) -> None:
    assert chat(seeing, header, FOUR) == [[]]


@pytest.mark.parametrize("control", ["10.0.0.1", "nonsense", "10.0.0.1:"])
def test_what_is_no_address_is_not_dialled(seeing: Worker, control: str) -> None:
    assert chat(seeing, write_header([ImageEncoder(control, "e1"), TWO], SECRET), FOUR, SIX) == [[None, "e2"]]


def test_text_names_none(seeing: Worker) -> None:
    header = write_header([ONE], SECRET)
    assert told(seeing, "/v1/completions", {"prompt": "abc", "max_tokens": 1}, header) == [[]]


def test_a_decode_worker_fetches_none(tmp_path: Path) -> None:
    with started(tmp_path, "decode") as worker:
        assert chat(worker, write_header([ONE], SECRET), FOUR) == [[]]
