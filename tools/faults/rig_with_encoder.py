"""The rig with an encoder worker beside the pair, and a tiny model that sees: prompts get the features of their images from it.

What the prompts must be answered is known from the same prefill worker, asked before there is an encoder worker.
"""

import asyncio
import json
from typing import Any

import aiohttp
import httpx2 as httpx
import psutil

from tests.e2e.cluster import READY_S, wait_until
from tests.frontend.vision import file_of, picture, url_of
from tests.models.tiny_seeing import END, IMAGE, START, make_seeing_checkpoint
from tools.faults.rig import DEATH_S, Rig, role_of

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
        wait_until(lambda: self._serves(), within_s=READY_S, what="prompts get features from the encoder worker")

    def await_refusal(self) -> None:
        wait_until(lambda: self._is_refused(), within_s=READY_S, what="features of the encoder worker are refused")

    def _serves(self) -> bool:
        before = self.num_fetched
        self._probe()
        return self.num_fetched > before

    def _is_refused(self) -> bool:
        before = self.num_refused
        self._probe()
        return self.num_refused > before

    def _probe(self) -> None:
        """Ask for images that nobody has asked for."""
        self._num_probes += 1
        body = body_of(FIRST_PROBE + self._num_probes)
        httpx.post(f"{self.router}/generate", json=body, timeout=ANSWER_S).raise_for_status()

    @property
    def num_fetched(self) -> int:
        return int(self.state("prefill")["counters"].get("features_fetched", 0))

    @property
    def num_refused(self) -> int:
        return int(self.state("prefill")["counters"].get("feature_fetches_refused", 0))

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

    def tree(self) -> list[psutil.Process]:
        """Of the encoder worker."""
        return self.parts[ENCODE].tree()

    def kill_encoder(self) -> None:
        dying = self.tree()
        dying[0].kill()
        _, living = psutil.wait_procs(dying, timeout=DEATH_S)
        assert not living, f"outlive the encoder worker that was killed: {living}"

    def _command(self, name: str) -> list[str]:
        command = super()._command(name)
        if name == "router":
            return [*command, "--encode", self._url_for_router(ENCODE), "--health-check-interval-secs", "0.5"]
        if name == "bootstrap":
            return command
        at = command.index("--chunked-prefill-size")
        fetches = ["--feature-fetch"] if role_of(name) == "prefill" else []
        return [*command[:at], "--model-path", self._tower if name == ENCODE else self._model, *SMALL, *fetches]
