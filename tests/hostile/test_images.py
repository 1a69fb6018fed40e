"""A thousand hostile images at a worker whose model sees: each is a 400 that names its part, or was an image after all. Hosts that do harm:
tests/images. Nothing beside suffers, no memory stays."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import psutil
import pytest

from tests.frontend.conftest import Worker, start_worker
from tests.frontend.vision import base64_of, file_of, picture, write_vision_checkpoint
from tests.hostile.means import our_traceback
from tests.hostile.wrong_images import BOMBS, FORMATS, bomb, hostile_images

PATH, FIELD = "/v1/chat/completions", "messages[0].content[1].image_url"
AT_A_TIME = 8
JSON = {"Content-Type": "application/json"}
MOST_GROWTH_BYTES = 400 << 20  # 256 MB of it are pixels that the worker keeps; a bomb alone would take 300


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("seeing")
    write_vision_checkpoint(folder / "tiny")
    with start_worker(folder, process=True) as w:
        yield w
        assert w.process.poll() is None and (found := our_traceback(w.log)) is None, found


def body_of(data: bytes) -> bytes:
    image = {"type": "image_url", "image_url": {"url": f"data:;base64,{base64_of(data)}"}}
    parts = [{"type": "text", "text": "a"}, image]
    return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 1}).encode()


def test_a_thousand_hostile_images(seeing: Worker) -> None:
    images = dict(hostile_images())
    assert len(images) >= 1000
    process = psutil.Process(seeing.process.pid)  # type: ignore[union-attr]
    before = process.memory_info().rss
    over = threading.Event()
    with ThreadPoolExecutor(1) as beside, httpx.Client(base_url=seeing.url, timeout=60, headers=JSON) as http:
        going_on = beside.submit(good_all_the_while, seeing.url, over)
        try:
            with ThreadPoolExecutor(AT_A_TIME) as pool:
                found = pool.map(lambda data: http.post(PATH, content=body_of(data)), images.values())
                answers = dict(zip(images, found, strict=True))
        finally:
            over.set()
        assert going_on.result() > 0
    wrong = {name: answer.text[:300] for name, answer in answers.items() if not is_fine(answer)}
    assert wrong == {}
    served = [name for name, answer in answers.items() if answer.status_code == 200]
    assert all(" flip " in name for name in served) and 0 < len(served) < 500
    assert process.memory_info().rss - before < MOST_GROWTH_BYTES


def is_fine(answer: httpx.Response) -> bool:
    if answer.status_code == 200:
        return True
    error = answer.json()["error"]
    return answer.status_code == 400 and error["param"] == FIELD and error["message"].startswith(f"{FIELD}: ")


def good_all_the_while(url: str, over: threading.Event) -> int:
    count, good = 0, body_of(file_of(picture(56, 56)))
    with httpx.Client(base_url=url, timeout=60, headers=JSON) as http:
        while not over.wait(0.05) or count == 0:
            answer = http.post(PATH, content=good)
            assert answer.status_code == 200, answer.text
            count += 1
    return count


@pytest.mark.parametrize("format", FORMATS)
def test_bombs_are_refused_by_their_headers(seeing: Worker, format: str) -> None:
    for side in BOMBS:
        answer = seeing.http.post(PATH, content=body_of(bomb(format, side)), headers=JSON)
        assert answer.status_code == 400 and "has more than 33554432 pixels; send a smaller one" in answer.text


def test_no_url_leads_inside(seeing: Worker) -> None:
    """The worker's own port, where its metrics and its control are."""
    port = seeing.url.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0.0.0.0"):
        parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": f"http://{host}:{port}/health"}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        assert seeing.error(PATH, body)["param"] == FIELD, host
