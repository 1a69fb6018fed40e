"""The frontend of an encode worker: it says what it is to whoever wants tokens, and is healthy once its tower has encoded an image."""

from collections.abc import Iterator

import pytest

from engine.frontend.routes import ROUTES
from tests.frontend.conftest import Worker, start_worker, wait_for
from tests.frontend.vision import write_vision_checkpoint

COMPUTING = sorted({(route.method, route.path) for route in ROUTES if route.computes})


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("encode")
    write_vision_checkpoint(folder / "tiny")
    with start_worker(folder, mode="encode", warms_up=True) as worker:
        wait_for(lambda: worker.http.get("/health").status_code == 200)
        yield worker


def test_every_route_that_needs_the_text_model_is_refused_by_name(encoder: Worker) -> None:
    assert {"/generate", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/encode", "/api/chat"} <= {
        path for _, path in COMPUTING
    }
    for method, path in COMPUTING:
        answer = encoder.http.request(method, path, json={"text": "a"})
        assert answer.status_code == 400 and "send the request to the router" in answer.text, path
        assert "this is an encode worker (--disaggregation-mode encode)" in answer.text, path
    assert all(request.images for request in encoder.scheduler.seen), "a prompt reached the scheduler"


def test_other_routes_are_served(encoder: Worker) -> None:
    assert encoder.post("/tokenize", {"prompt": "ab"}).json()["count"] == 2
    assert encoder.http.get("/health").status_code == 200
    assert encoder.http.get("/server_info").json()["disaggregation_mode"] == "encode"


def test_health_encodes_a_small_image(encoder: Worker) -> None:
    before = len(encoder.scheduler.seen)
    assert encoder.http.get("/health_generate").status_code == 200
    (request,) = encoder.scheduler.seen[before:]
    assert request.alone and len(request.images) == 1 and len(request.input_ids) == request.images[0].num_tokens
    assert request.images[0].pixels and not request.bootstrap
