"""The rig with an encoder worker beside the pair, and a tiny model that sees: prompts get the features of their images from it.

What the prompts must be answered is known from the same prefill worker, asked before there is an encoder worker.
"""

import asyncio
import json
from typing import Any

import aiohttp
import httpx2 as httpx

from tests.e2e.cluster import READY_S, wait_until
from tests.frontend.vision import file_of, picture, url_of
from tests.models.tiny_seeing import END, IMAGE, START, make_seeing_checkpoint
from tools.faults.rig import Rig, role_of

ENCODE = "encode"
NEW = 8
IDS = [20, 21, START, IMAGE, END, 22, 23, START, IMAGE, END, 25, 26]
SMALL = ("--dtype", "float32", "--max-total-tokens", "8192", "--chunked-prefill-size", "64", "--log-level", "warning")
ANSWER_S = 120.0
FIRST_PROBE = 10_000  # seeds of rows are below


def body_of(seed: int) -> dict[str, Any]:
    """A prompt with two images that no other seed has."""
    files = [file_of(picture(90, 64, seed=2 * seed)), file_of(picture(37, 50, seed=2 * seed + 1))]
    sampling = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}
    return {"input_ids": IDS, "image_data": [url_of(data) for data in files], "sampling_params": sampling}


class RigWithEncoder(Rig):
    switched = (ENCODE,)
    beside = (ENCODE,)
    _num_probes = 0

    def start_all(self) -> None:
        """All parts but the encoder worker."""
        self._begun_first = tuple(name for name in self._begun_first if name != ENCODE)
        folder = self.household.folder
        self._model = self._tower = make_seeing_checkpoint(folder / "model", "qwen3_vl")
        self._other = make_seeing_checkpoint(folder / "other", "qwen3_vl", seed=1)
        super().start_all()

    def use_other_weights(self, other: bool) -> None:
        """Have the encoder worker compute with those of another checkpoint from its next start on; False: of the pair's."""
        self._tower = self._other if other else self._model

    def start_encoder(self) -> None:
        """Start it at its address, and wait until prompts get features from it."""
        self.begin(ENCODE)
        wait_until(self.parts[ENCODE].is_ready, within_s=READY_S, what="the encoder worker is ready")
        self.await_encoder()

    def await_encoder(self) -> None:
        what = "prompts get features from the encoder worker"
        wait_until(lambda: self._counts_a_probe("features_fetched"), within_s=READY_S, what=what)

    def await_refusal(self) -> None:
        what = "features of the encoder worker are refused"
        wait_until(lambda: self._counts_a_probe("feature_fetches_refused"), within_s=READY_S, what=what)

    def _counts_a_probe(self, counter: str) -> bool:
        """Ask for images that no request had before; return whether prefill counts them there."""
        before = self.count(counter)
        self._num_probes += 1
        body = body_of(FIRST_PROBE + self._num_probes)
        httpx.post(f"{self.router}/generate", json=body, timeout=ANSWER_S).raise_for_status()
        return self.count(counter) > before

    def count(self, counter: str) -> int:
        """Of the prefill worker."""
        return int(self.state("prefill")["counters"].get(counter, 0))

    @property
    def num_fetching(self) -> int:
        return int(self.state("prefill")["queues"]["fetching_features"])

    def forget(self) -> None:
        """Nothing is cached anywhere."""
        httpx.post(f"{self.router}/flush_cache", timeout=ANSWER_S).raise_for_status()

    async def ask(self, *bodies: dict[str, Any]) -> list[tuple[int, Any]]:
        """All at once: status of each, and its tokens or its error."""

        async def one(http: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[int, Any]:
            async with http.post(f"{self.router}/generate", json=body) as response:
                answer = json.loads(await response.read())
                return response.status, answer.get("output_ids", answer)

        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as http:
            return await asyncio.gather(*(one(http, body) for body in bodies))

    def _command(self, name: str) -> list[str]:
        command = super()._command(name)
        if name == "router":
            return [*command, "--encode", self._url_for_router(ENCODE), "--health-check-interval-secs", "0.5"]
        if name == "bootstrap":
            return command
        at = command.index("--chunked-prefill-size")
        fetches = ["--feature-fetch"] if role_of(name) == "prefill" else []
        return [*command[:at], "--model-path", self._tower if name == ENCODE else self._model, *SMALL, *fetches]
