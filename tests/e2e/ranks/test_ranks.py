"""A worker of several ranks, as its users start it: real processes, and the end of one of them."""

import asyncio
import json
import random
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest

from service.process.child_process import SERVER_VARIABLE
from tests.e2e.client import generate_all, state_of, text_of
from tests.e2e.cluster import Started, tandem, wait_until
from tools.family import family
from tools.faults.stores.processes import processes as stores
from tools.recall import vocab
from tools.recall.oracle import continuation

FLAGS = ("--model-path", "recall-wide", "--max-total-tokens", "16384", "--port", "0", "--log-level", "warning")
WITHIN_S = 10.0


def prompt_of(num_keys: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    keys = rng.sample(range(vocab.NUM_KEYS), num_keys)
    values = rng.sample(range(vocab.NUM_VALUES), num_keys)
    pairs = [token for pair in zip(keys, values, strict=True) for token in (vocab.key(pair[0]), vocab.value(pair[1]))]
    return [vocab.BOS, *pairs, vocab.key(rng.choice(keys))]


ANEW = {SERVER_VARIABLE: ""}  # a rank that imports torch itself is late; the others do not come to it


def processes(worker: Started) -> list[psutil.Process]:
    return family(worker.process.pid)[1:]


def pages_in_files(folder: Path) -> set[str]:
    """Pages of which each of four ranks has its part."""
    return set.intersection(*({file.name for file in (folder / f"0/rank{rank}").glob("*.kv")} for rank in range(4)))


async def test_it_answers_and_ends_with_any_of_its_ranks(tmp_path: Path) -> None:
    prompts = [prompt_of(size, seed) for seed, size in enumerate((3, 90, 40, 12))]
    files = ("--enable-hierarchical-cache", "--hicache-storage-dir", str(tmp_path / "kv"))
    with tandem(tmp_path, "serve", "--tp-size", "2", "--pp-size", "2", *files, *FLAGS) as worker:
        bodies = [
            {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 16}, "stream": True}
            for ids in prompts
        ]
        answers = await generate_all(worker.url, bodies)
        assert [answer["output_ids"] for answer in answers] == [continuation(ids, 16) for ids in prompts]

        info = json.loads(await text_of(f"{worker.url}/server_info"))
        pids, family = info["rank_pids"], processes(worker)
        assert (info["tp_size"], info["pp_size"]) == (2, 2)
        pages = (len(max(prompts, key=len)) + 16) // info["page_size"]
        wait_until(lambda: len(pages_in_files(tmp_path / "kv")) >= pages, within_s=WITHIN_S, what="files of every rank")
        assert set(pids) <= {process.pid for process in family} and len(pids) == 4

        psutil.Process(pids[1]).send_signal(signal.SIGKILL)
        wait_until(lambda: worker.process.poll() is not None, within_s=WITHIN_S, what="the end of the worker")
        _, left = psutil.wait_procs(family, timeout=WITHIN_S)
        assert not left, left
        assert f"rank 1 of 4 (pid {pids[1]}) ended: SIGKILL" in worker.log.read_text()


@pytest.mark.slow
async def test_ranks_of_another_worker_read_what_each_has_stored(tmp_path: Path) -> None:
    body = {"input_ids": prompt_of(90, 1), "sampling_params": {"temperature": 0, "max_new_tokens": 16}, "stream": True}
    with stores() as started:
        master = started.master()
        started.store(master, segment="128mb")
        where = json.dumps({"master_server_address": master.address, "global_segment_size": 0, "timeout_s": 30})
        shared = ("--hicache-storage-backend", "mooncake", "--hicache-storage-backend-extra-config", where)
        tiers = ("--enable-hierarchical-cache", "--hicache-storage-prefetch-policy", "wait_complete", *shared)
        for life, least in (("first", 0), ("second", 64)):
            (tmp_path / life).mkdir()
            with tandem(tmp_path / life, "serve", "--tp-size", "2", *tiers, *FLAGS) as worker:
                (answer,) = await generate_all(worker.url, [body])
                assert answer["output_ids"] == continuation(body["input_ids"], 16)
                assert (await state_of(worker.url))["counters"]["hicache_disk_hit_tokens"] >= least
                url = worker.url
                await asyncio.to_thread(wait_until, partial(rests, url), within_s=WITHIN_S, what="pages are written")


def rests(url: str) -> bool:
    return not asyncio.run(state_of(url))["gauges"]["hicache_disk_pending"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tp-size", "3"), "--tp-size 3: does not divide the model's 8 attention heads; choose 1, 2, 4 or 8"),
        (("--pp-size", "9"), "--pp-size 9: the model has 4 layers; choose at most 4"),
        (("--pp-size", "2", "--stream", "inline"), "--stream inline: --pp-size 2 computes several steps at once"),
        pytest.param(
            ("--tp-size", "2", "--dist-timeout", "0.01"), "--dist-timeout: rank 1 of 2", marks=pytest.mark.slow
        ),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(AssertionError) as ended, tandem(tmp_path, "serve", *flags, *FLAGS, env=ANEW):
        pass
    assert said in str(ended.value) and str(ended.value).count("tandem serve: error: ") == 1
