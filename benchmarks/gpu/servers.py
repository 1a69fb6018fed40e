"""Whole servers on one GPU: `tandem up` with generated weights, measured by `tandem bench`."""

import asyncio
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import requests

from benchmarks.cluster import Cluster, answers, post, tandem_up
from benchmarks.cpu_use import SCHEDULER
from benchmarks.gpu.target import QWEN3_06B, QWEN3_8B, TABLE, TINY, Shape, Target
from benchmarks.measures import used_s
from deploy.bench.config import GENERATE, BenchConfig
from deploy.bench.load import Measured
from deploy.bench.run import measure
from deploy.bench.stats import Distribution, is_good
from tests.models.tiny_checkpoints import tiny_config, write_json, write_tokenizer
from tools.family import children, family, lives
from tools.recall import vocab
from tools.recall.oracle import continuation

GOOD_S = {"ttft": 1.0, "tpot": 0.05}
WITHIN_S, ASK_S, ASK_EVERY_S = 60.0, 10.0, 0.1
ANSWER = 16
UPDATES = 4
SMS = "SMs of decodes + prompts beside each other: "
ONE: dict[str, Any] = {"input_ids": [20, 21, 22], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}


def serve(target: Target) -> dict[str, Any]:
    """A pair that shares the GPU: many streams, the cores that each process took, and ITL while KV of long prompts arrives."""
    found: dict[str, Any] = {"rows": []}
    with _model(target, QWEN3_8B) as folder, _up(target, folder) as up:
        found["ready_s"] = up.ready_s
        for streams in target.pick((64, 256), (2,)):
            found["rows"].append(_streams(target, up, streams))
            target.keep(found)
        found["beside"] = [{"layout": "pair", **_beside(target, up)}]
    return found


def pdmux(target: Target) -> dict[str, Any]:
    """One worker with mixed chunks, then one with PD multiplexing: what `serve` says of a pair, and how the lanes divided the GPU."""
    mux = ("--enable-pdmux", "--pdmux-itl", "0.03")
    found: dict[str, Any] = {"rows": []}
    with _model(target, QWEN3_8B) as folder, TemporaryDirectory(prefix="tandem-gpu-") as logs:
        for layout, flags in (("mixed chunks", ("--enable-mixed-chunk",)), ("PD multiplexing", mux)):
            with _up(target, folder, "--unified", "--run-dir", logs, *flags) as up:
                streams = _streams(target, up, target.pick(64, 2))
                row = {"layout": layout, **_beside(target, up), "streams": streams, **_division(up, Path(logs))}
                found["rows"].append(row)
            target.keep(found)
    return found


def kill(target: Target) -> dict[str, Any]:
    """Kill a decode worker under load. What lives, and when are there answers again?

    With MPS `tandem up` ends the prefill worker, too. Asks the shipped model, whose answers are right only if KV crossed.
    """
    with _up(target, "", "--disaggregation-kv-checksum") as up, ThreadPoolExecutor(1) as pool:
        ids = [_pairs(seed, count=40 + 40 * seed) for seed in range(target.pick(16, 2))]
        sampling = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
        found = [one["output_ids"] for one in post(up.url, {"input_ids": ids, "sampling_params": sampling})]
        right = [continuation(prompt, ANSWER, ignore_eos=True) for prompt in ids]
        assert found == right, "wrong answers of a pair"
        before, pids, urls = _used_mb(target), dict(up.pids), dict(up.workers)
        load = target.pick({"num_requests": 256, "output_len": 400}, {"num_requests": 4, "output_len": 200})
        under_load = pool.submit(_measured, target, up.url, concurrency=32, input_len=64, **load)
        assert _came(lambda: _running(urls["decode"]) > 0), "no request was decoded"
        for process in family(pids["decode"]):
            process.kill()
        begin = time.monotonic()
        ask = {"input_ids": ids[0], "sampling_params": sampling}
        is_back, back_s = _came(lambda: _answer_to(up.url, ask) == right[0]), time.monotonic() - begin
        prefill_lives = lives(psutil.Process(pids["prefill"])) and answers(urls["prefill"] + "/health", 200)
        row = {"prefill_lives": int(prefill_lives), "back_s": back_s if is_back else None}
        row["lost_mb"] = _used_mb(target) - before
        target.keep({**row, "rows": [row]})
        row["failed"] = sum(record.error is not None for record in under_load.result().records)
    return {**row, "rows": [row]}


def updates(target: Target) -> dict[str, Any]:
    """New weights, several times: seconds, and the memory that each keeps (graphs are recorded anew). Then KV's memory goes, and comes."""
    found: dict[str, Any] = {"rows": []}
    with _model(target, QWEN3_06B) as folder, _up(target, folder, "--unified", "--enable-memory-saver") as up:

        def note(what: str, path: str, body: Mapping[str, object]) -> None:
            begin = time.monotonic()
            post(up.url, body, path)
            row = {"what": what, "s": time.monotonic() - begin, "used_mb": _used_mb(target)}
            found["rows"].append(row)
            target.keep(found)

        for number in range(1, 1 + UPDATES):
            note(f"update {number}", "/update_weights_from_disk", {"model_path": folder})
            post(up.url, ONE)
        note("release", "/release_memory_occupation", {})
        note("resume", "/resume_memory_occupation", {})
        note("answer", "/generate", ONE)
    # the first update may keep what later ones use again
    kept_mb = (found["rows"][UPDATES - 1]["used_mb"] - found["rows"][0]["used_mb"]) / (UPDATES - 1)
    return {**found, "kept_mb": kept_mb}


def drafters(target: Target) -> dict[str, Any]:
    """A step that verifies drafts, beside a plain one: EAGLE-3 and an MTP layer, with generated weights."""
    shape = target.pick(QWEN3_8B, replace(TINY, layers=4))
    own = target.pick(TABLE["glm"], {"num_hidden_layers": 2}) | {"first_k_dense_replace": 99}  # no experts
    mtp = {**tiny_config("glm4_moe", "bfloat16"), **own, "num_nextn_predict_layers": 1}
    eagle = shape.fields(context=4096) | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    eagle |= {"num_hidden_layers": 1, "draft_vocab_size": shape.vocab}
    eagle["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, shape.layers // 3, shape.layers - 2]}
    found: dict[str, Any] = {"rows": []}
    with _folder(shape.fields(context=4096)) as dense, _folder(mtp) as glm, _folder(eagle) as drafter:
        eagle3 = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", drafter)
        for model, flags in ((dense, ()), (dense, eagle3), (glm, ()), (glm, ("--speculative-algorithm", "NEXTN"))):
            with _up(target, model, "--unified", "--max-running-requests", "8", *flags) as up:
                row = {"model": "dense" if model is dense else "GLM", "drafter": flags[1] if flags else "none"}
                row |= _step(up, target.pick(256, 8))
            plain = row if not flags else found["rows"][-1]
            found["rows"].append({**row, "of_plain": row["step_ms"] / plain["step_ms"]})
            target.keep(found)
    return found


# ---- servers


@contextmanager
def _folder(fields: Mapping[str, object]) -> Iterator[str]:
    """A directory that a server with generated weights can be started from."""
    with TemporaryDirectory(prefix="tandem-gpu-") as folder:
        write_json(Path(folder) / "config.json", fields)
        write_tokenizer(Path(folder))
        yield folder


def _model(target: Target, shape: Shape) -> Any:
    return _folder(target.pick(shape, TINY).fields(context=target.pick(16384, 2048)))


def _up(target: Target, folder: str = "", *flags: str) -> Any:
    """`folder`: "": the shipped model."""
    device = target.pick(("--device", "cuda", "--share-gpus"), ("--device", "cpu", "--num-threads", "1"))
    model = ("--model-path", folder, "--load-format", "dummy") if folder else ()
    return tandem_up(*device, *model, *flags)


def _used_mb(target: Target) -> float:
    """Memory of the GPU that anyone uses."""
    if target.small:
        return 0.0
    command = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    return float(said.splitlines()[0]) * 2**20 / 1e6


def _running(url: str) -> int:
    return int(requests.get(url + "/server_info", timeout=10).json().get("num_running_reqs", 0))


def _division(up: Cluster, logs: Path) -> dict[str, Any]:
    """Divisions that the worker chooses from, and the share of decodes by now; none without PD multiplexing."""
    said = [line.partition(SMS)[2] for line in (logs / "unified-0.log").read_text().splitlines() if SMS in line]
    metrics = requests.get(up.url + "/metrics", timeout=10).text.splitlines()
    shares = [float(line.split()[-1]) for line in metrics if line.startswith("tandem_decode_share")]
    return {"sms": said[-1] if said else "-", "decode_share": shares[-1] if shares else None}


def _answer_to(url: str, body: Mapping[str, Any]) -> list[int] | None:
    try:
        return list(requests.post(url + "/generate", json=body, timeout=ASK_S).json()["output_ids"])
    except (requests.RequestException, KeyError):
        return None


def _pairs(seed: int, *, count: int) -> list[int]:
    """A prompt of the shipped model: pairs of a key and a value, then a key again."""
    known = random.Random(seed).sample(range(16, vocab.VOCAB_SIZE), min(count, vocab.VOCAB_SIZE - 16))
    return [vocab.BOS, *known, known[0]]


def _came(is_so: Callable[[], bool]) -> bool:
    """Wait until something is so, for WITHIN_S at most."""
    deadline_s = time.monotonic() + WITHIN_S
    while not (came := is_so()) and time.monotonic() < deadline_s:
        time.sleep(ASK_EVERY_S)
    return came


# ---- loads


def _measured(target: Target, url: str, **flags: Any) -> Measured:
    """As `tandem bench`, of random tokens; failed requests are in the records."""
    common: dict[str, Any] = {"api": GENERATE, "prompt": "ids", "max_token_id": target.pick(150_000, 500)}
    [found] = asyncio.run(measure(BenchConfig(url=url, disable_progress=True, **common, **flags)))
    return found


def _streams(target: Target, up: Cluster, streams: int) -> dict[str, Any]:
    lengths = target.pick({"input_len": 512, "output_len": 128}, {"input_len": 20, "output_len": 5})
    processes = _processes(up)
    before = {name: used_s(of) for name, of in processes.items()}
    found = _measured(target, up.url, num_requests=3 * streams, concurrency=streams, seed=streams, **lengths)
    cores = {name: round((used_s(of) - before[name]) / found.duration_s, 2) for name, of in processes.items()}
    good = sum(is_good(record, GOOD_S) for record in found.records)
    tokens_s = found.summary.output_tokens_per_s
    rates = {"output_tokens_s": tokens_s, "good_s": good / found.duration_s, "errors": found.summary.errors}
    return {"streams": streams, **rates, **_times(found), "cores": cores}


def _beside(target: Target, up: Cluster) -> dict[str, Any]:
    """ITL of 16 streams alone, and while long prompts are computed one after another, which begin first and end last."""
    steady = target.pick(
        {"num_requests": 16, "concurrency": 16, "input_len": 128, "output_len": 300},
        {"num_requests": 2, "concurrency": 2, "input_len": 20, "output_len": 10},
    )
    long = target.pick({"num_requests": 16, "input_len": 8192}, {"num_requests": 3, "input_len": 200})
    alone = _times(_measured(target, up.url, seed=1, **steady))
    with ThreadPoolExecutor(1) as pool:
        computed = pool.submit(_measured, target, up.url, concurrency=1, output_len=2, seed=2, **long)
        beside = _measured(target, up.url, seed=3, **steady)
    prompts = computed.result()
    overlap = min(1.0, prompts.duration_s / beside.duration_s)
    found = {f"alone_{name}": value for name, value in alone.items()} | _times(beside)
    return {**found, "prompts_ttft_p50_ms": _times(prompts)["ttft_p50_ms"], "overlap": overlap}


def _times(found: Measured) -> dict[str, float | None]:
    def ms(of: Distribution | None, name: str) -> float | None:
        return None if of is None else 1000 * getattr(of, name)

    summary = found.summary
    names = (("ttft", summary.ttft_s), ("itl", summary.itl_s), ("tpot", summary.tpot_s))
    return {f"{of}_{name}_ms": ms(kept, name) for of, kept in names for name in ("p50", "p99", "max")}


def _processes(up: Cluster) -> dict[str, list[psutil.Process]]:
    """By what they do: schedulers and HTTP of each worker, and what else the launcher has started."""
    found: dict[str, list[psutil.Process]] = {}
    workers, seen = {pid: role for role, pid in up.pids if role != "up"}, set[int]()
    for child in sorted(children(dict(up.pids)["up"]), key=lambda child: child.pid not in workers):
        role = workers.get(child.pid, "router")
        for process in family(child.pid):
            if process.pid not in seen:  # a fork server's children are workers'
                name = f"{role}'s scheduler" if SCHEDULER in " ".join(process.cmdline()) else role
                found.setdefault(name, []).append(process)
                seen.add(process.pid)
    return found


def _step(up: Cluster, tokens: int) -> dict[str, float]:
    """Milliseconds of a step of one request: of more tokens, less that of few. Drafts that are often wrong get fewer."""

    def answer(new_tokens: int) -> tuple[float, dict[str, Any]]:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        begin = time.monotonic()
        found = post(up.url, {"input_ids": list(range(20, 40)), "sampling_params": sampling})
        return time.monotonic() - begin, found["meta_info"]

    answer(tokens)
    few_s, _ = answer(1)
    many_s, info = answer(1 + tokens)
    accepted = float(info.get("spec_accept_length", 1.0))
    drafted = info.get("spec_draft_token_num", 0) / info.get("spec_verify_ct", 1)
    return {"step_ms": 1000 * (many_s - few_s) / tokens * accepted, "accepted": accepted, "drafted": drafted}
