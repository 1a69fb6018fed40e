"""Three pools of real processes, and a unified worker beside them: whoever encodes an image, its prompt gets the same tokens."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest

from service.http.image_encoders import ENCODERS_HEADER, ImageEncoder, write_header
from tests.e2e.client import left_over, state_of
from tests.e2e.cluster import DEAD, SETTLE_S, Cluster, Worker, cluster, wait_until
from tests.e2e.roles import server_info
from tests.frontend.vision import file_of, picture, url_of
from tests.models.tiny_seeing import END, IMAGE, START, make_seeing_checkpoint
from tools.family import family, lives

FLAGS = ("--dtype", "float32", "--max-total-tokens", "8192", "--chunked-prefill-size", "32", "--page-size", "4")
SIZES = ("--prefill", "1", "--decode", "1", "--mixed", "1", "--encode", "1")
SECRET = b"only this cluster knows it"
FILES = [file_of(picture(37, 50, mode="RGBA", seed=1)), file_of(picture(90, 64, seed=2), "JPEG")]
IDS = [20, 21, START, IMAGE, END, 22, 23, START, IMAGE, END, 25, 26]
BODY: dict[str, Any] = {
    "input_ids": IDS,
    "image_data": [url_of(data) for data in FILES],
    "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def epd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("epd")
    path = make_seeing_checkpoint(folder / "qwen3_vl", "qwen3_vl")
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    checked = ("--transfer-backend", "nixl", "--disaggregation-kv-checksum", "--cluster-secret-file", str(secret))
    with cluster(folder, *SIZES, *checked, "--model-path", path, *FLAGS, DEAD) as c:
        yield c


@pytest.fixture(scope="module")
def right(epd: Cluster) -> list[int]:
    """Of the unified worker, which encodes the images itself."""
    tokens = ask(one(epd, "unified"), {})
    assert counters(one(epd, "unified"))["mm_encoded_images"] == len(FILES)
    return tokens


def one(up: Cluster, role: str) -> Worker:
    (worker,) = up.of(role)
    return worker


def counters(worker: Worker) -> dict[str, float]:
    return asyncio.run(state_of(worker.url))["counters"]  # type: ignore[no-any-return]


def named_by(encoder: Worker) -> dict[str, str]:
    """The header of a router that chose the encoder for both images."""
    named = json.loads(server_info(encoder)["image_encoder"])
    return {ENCODERS_HEADER: write_header([ImageEncoder(**named)] * len(FILES), SECRET)}


def post(url: str, body: dict[str, Any], headers: dict[str, str]) -> list[int]:
    answer = httpx.post(f"{url}/generate", json=body, headers=headers, timeout=60).raise_for_status().json()
    return answer["output_ids"]  # type: ignore[no-any-return]


def ask(worker: Worker, headers: dict[str, str]) -> list[int]:
    """Without anything in its caches."""
    httpx.post(f"{worker.url}/flush_cache", timeout=60).raise_for_status()
    return post(worker.url, BODY, headers)


def ask_pair(up: Cluster, headers: dict[str, str], *, room: int) -> list[int]:
    """As the router does: both at once. The header goes to prefill."""
    prefill, decode = one(up, "prefill"), one(up, "decode")
    for worker in (prefill, decode):
        httpx.post(f"{worker.url}/flush_cache", timeout=60).raise_for_status()
    port = server_info(prefill)["disaggregation_bootstrap_port"]
    body = {**BODY, "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(post, prefill.url, body, headers), pool.submit(post, decode.url, body, {})]
        return asked[1].result()


def assert_all_back(*workers: Worker) -> None:
    for worker in workers:
        wait_until(
            lambda url=worker.url: left_over(asyncio.run(state_of(url))) is None,  # type: ignore[misc]
            within_s=SETTLE_S,
            what=f"{worker.role}: all memory is back",
        )


def test_features_of_the_encoder_give_the_tokens_of_the_worker_s_own(epd: Cluster, right: list[int]) -> None:
    encoder, unified, prefill = one(epd, "encode"), one(epd, "unified"), one(epd, "prefill")
    own = counters(unified)["mm_encoded_images"]
    encoded = counters(encoder)["mm_encoded_images"]
    assert ask(unified, named_by(encoder)) == right
    assert ask_pair(epd, named_by(encoder), room=7) == right
    assert counters(unified)["mm_encoded_images"] == own and counters(prefill)["mm_encoded_images"] == 0
    for worker in (unified, prefill):
        found = counters(worker)
        assert found["features_fetched"] == found["kv_checksum_verified"] == len(FILES), found
    found = counters(encoder)
    assert found["mm_encoded_images"] == encoded + len(FILES), "each image once, for both"
    assert found["features_sent"] == 2 * len(FILES)
    assert_all_back(*epd.workers)


def test_without_a_header_a_worker_encodes_itself(epd: Cluster, right: list[int]) -> None:
    before = counters(one(epd, "prefill"))["mm_encoded_images"]
    assert ask_pair(epd, {}, room=8) == right
    assert counters(one(epd, "prefill"))["mm_encoded_images"] == before + len(FILES)


def test_the_encoder_generates_nothing_and_stays_what_it_is(epd: Cluster) -> None:
    answer = httpx.post(f"{one(epd, 'encode').url}/generate", json=BODY, timeout=60)
    assert answer.status_code == 400 and "this is an encode worker" in answer.json()["error"]["message"]
    assert httpx.get(f"{one(epd, 'encode').url}/health_generate", timeout=60).status_code == 200
    answer = httpx.post(f"{one(epd, 'encode').url}/switch_role", json={"role": "prefill"}, timeout=60)
    assert answer.status_code == 400 and "this worker keeps its role" in answer.text


def test_an_encoder_that_is_killed_costs_no_request(epd: Cluster, right: list[int]) -> None:
    """By the router, too, which may not know of it yet."""
    encoder, unified = one(epd, "encode"), one(epd, "unified")
    header, processes = named_by(encoder), family(encoder.pid)
    os.kill(encoder.pid, signal.SIGKILL)
    assert post(epd.router, BODY, {}) == ask(unified, header) == ask_pair(epd, header, room=9) == right
    wait_until(lambda: not any(map(lives, processes)), within_s=SETTLE_S, what="its engine has ended, too")
    before = counters(unified)["mm_encoded_images"]
    assert ask(unified, header) == right
    assert counters(unified)["mm_encoded_images"] == before + len(FILES)
    assert_all_back(*(worker for worker in epd.workers if worker is not encoder))
