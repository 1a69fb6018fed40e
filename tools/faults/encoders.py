"""`make encoder-faults`: real processes, every fault of an encoder worker while prompts wait for its features; docs/reports/encoder_faults.json.

usage: python -m tools.faults.encoders [--backend nixl] [--report FILE]

In each row prompts with images are asked, the encoder's writes are held until all images are being fetched, the fault strikes, the hold ends.
All answers must be right: an encoder worker's trouble costs time alone. Then the prefill and the decode worker must be clean, and
once the encoder worker is back, prompts get features from it again. Exit status 1 where a row fails. What the prompts must be answered
is known from the same prefill worker, asked before there is an encoder worker.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx2 as httpx

from disagg.feature_transfers import FETCH_TIMEOUT_S
from tests.e2e.cluster import READY_S, wait_until
from tests.frontend.vision import file_of, picture, url_of
from tests.models.tiny_seeing import END, IMAGE, START, make_seeing_checkpoint
from tools.faults.cells import BACKENDS
from tools.faults.household import SETTLE_S, unclean, until
from tools.faults.report import REPORTS, about_run, keep
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


REPORT = "encoder_faults.json"
PROMPTS = 3  # of two images each
STOP_S = 2.0
PHASE_S = 30.0


def _stop(rig: RigWithEncoder) -> None:
    rig.stop(ENCODE)
    time.sleep(STOP_S)
    rig.resume(ENCODE)


# Name -> what is done, and how it is done. Rows of AWAY leave no encoder worker behind.
ROWS: dict[str, tuple[str, Callable[[RigWithEncoder], None]]] = {
    "kill": ("SIGKILL", lambda rig: rig.kill(ENCODE)),
    "freeze": ("SIGSTOP for good, then SIGKILL", lambda rig: rig.stop(ENCODE)),
    "stop": (f"SIGSTOP for {STOP_S:g} s", _stop),
    "drain": ("SIGTERM", lambda rig: rig.drain(ENCODE)),
    "error": ("the first write of each image fails", lambda rig: rig.switch("fail", str(2 * PROMPTS))),
    "slow": ("writes begin after the prompts have given up", lambda rig: time.sleep(FETCH_TIMEOUT_S + 1.0)),
}
AWAY = ("kill", "freeze", "drain")
OTHER = "other-weights"


async def play(rig: RigWithEncoder, name: str, seeds: range, right: dict[int, Any]) -> dict[str, Any]:
    """One row: what was wrong (nothing, if all is well), and the seconds it took."""
    fetched, encode = rig.count("features_fetched"), rig.parts[ENCODE]
    pair = [rig.parts["prefill"], rig.parts["decode"]]
    rig.switch("hold", "")
    asked = asyncio.create_task(_problems(rig, seeds, right))
    await until(lambda: rig.num_fetching == 2 * PROMPTS, PHASE_S, "all images are being fetched")
    rig.household.note_segments()
    at_s = time.monotonic()
    await asyncio.to_thread(ROWS[name][1], rig)
    rig.switch("hold", None)
    problems = await asked
    slowest_s = time.monotonic() - at_s
    if name == "freeze":
        await asyncio.to_thread(rig.kill, ENCODE)
    if name in AWAY:
        await until(lambda: not encode.alive, SETTLE_S, "the encoder worker has ended")
    problems += await unclean(pair)
    settled_s = time.monotonic() - at_s
    came = rig.count("features_fetched") - fetched
    if name in AWAY:
        rig.begin(ENCODE)
        await until(rig.parts[ENCODE].is_ready, READY_S, "the encoder worker is back")
    back_s = time.monotonic()
    await asyncio.to_thread(rig.await_encoder)
    serves_s = time.monotonic() - back_s
    problems += await unclean([*pair, rig.parts[ENCODE]])
    problems += [f"left behind: {what}" for what in rig.household.left_behind()]
    times = {"slowest_s": slowest_s, "settled_s": settled_s, "serves_s": serves_s}
    rounded = {what: round(seconds, 1) for what, seconds in times.items()}
    return {"what": ROWS[name][0], "ok": not problems, "problems": problems, "fetched": came, **rounded}


async def play_other_weights(rig: RigWithEncoder, seeds: range, right: dict[int, Any]) -> dict[str, Any]:
    """The encoder worker comes back with another checkpoint, and then with its own.

    It starts in this thread: a worker ends with the thread that started it.
    """
    fetched = rig.count("features_fetched")
    _restart(rig, True)
    await asyncio.to_thread(rig.await_refusal)
    problems = await _problems(rig, seeds, right)
    if rig.count("features_fetched") != fetched:
        problems.append("features of other weights were taken")
    _restart(rig, False)
    await asyncio.to_thread(rig.await_encoder)
    problems += await unclean([rig.parts[name] for name in ("prefill", "decode", ENCODE)])
    return {"what": "SIGKILL, a start with another checkpoint", "ok": not problems, "problems": problems, "fetched": 0}


async def _problems(rig: RigWithEncoder, seeds: range, right: dict[int, Any]) -> list[str]:
    """Ask all prompts at once; return what is wrong with their answers."""
    answers = await rig.ask(*map(body_of, seeds))
    pairs = zip(answers, seeds, strict=True)
    return [f"status {status}: {got}" for (status, got), seed in pairs if got != right[seed]]


def _restart(rig: RigWithEncoder, other: bool) -> None:
    rig.kill(ENCODE)
    rig.use_other_weights(other)
    rig.begin(ENCODE)
    wait_until(rig.parts[ENCODE].is_ready, within_s=READY_S, what="the encoder worker is back")


def run(backend: str, names: list[str]) -> dict[str, Any]:
    """Each row by name. A row that fails ends the run: the next would fail because of it."""
    rig, rows = RigWithEncoder(backend), dict[str, Any]()
    seeds = {name: range(PROMPTS * i, PROMPTS * (i + 1)) for i, name in enumerate(names)}
    try:
        rig.start_all()
        every = [seed for of in seeds.values() for seed in of]
        answers = asyncio.run(rig.ask(*map(body_of, every)))
        assert all(status == 200 for status, _ in answers), answers
        right = {seed: tokens for seed, (_, tokens) in zip(every, answers, strict=True)}
        rig.forget()
        rig.start_encoder()
        for name in names:
            if name == OTHER:
                rows[name] = asyncio.run(play_other_weights(rig, seeds[name], right))
            else:
                rows[name] = asyncio.run(play(rig, name, seeds[name], right))
            print(f"{backend} {name}: {rows[name]}", flush=True)
            if not rows[name]["ok"]:
                break
    finally:
        left = rig.close()
    rows["end"] = {"what": "all parts end", "ok": not left, "problems": left}
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: all")
    parser.add_argument("--only", choices=[*ROWS, OTHER], action="append", help="a row; then no report is written")
    parser.add_argument("--report", type=Path, default=REPORTS)
    args = parser.parse_args()
    about, names = about_run(), args.only or [*ROWS, OTHER]
    found = {backend: run(backend, names) for backend in args.backend or BACKENDS}
    if not args.only and not args.backend:
        keep(args.report / REPORT, {"about": about, "rows": found})
    bad = [row for rows in found.values() for row in rows.values() if not row["ok"]]
    return int(bool(bad) or any(len(rows) <= len(names) for rows in found.values()))


if __name__ == "__main__":
    sys.exit(main())
