"""What must be right on a GPU: the CPU's tokens by every way and family, bytes that cross, no access out of bounds. Times nothing."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.cluster import ROOT, post, tandem_up
from benchmarks.gpu.attention import worst_error
from benchmarks.gpu.engine import EagerCapture, Run
from benchmarks.gpu.rates import KINDS
from benchmarks.gpu.target import Shape, Target
from benchmarks.random_model import write_model
from engine.assembly.leader import build_engine
from engine.assembly.parts import EngineParts
from engine.config import EngineConfig
from engine.core.mem_cache.host_cache import HostCache
from engine.core.plan import PageCopy, Plan, PlanItem, SlotOpen
from engine.device.step_memory import LocalMachine
from engine.kv.cache_spec import CacheSpec
from engine.kv.host_pool import HostPool
from engine.kv.kv_pool import KVPool
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from engine.sampler.sampler import make_sampler
from engine.sampling_params import SamplingParams
from service.flags import ConfigError
from tests.models.tiny_checkpoints import ARCHITECTURES, make_tiny_checkpoint
from tools.recall import vocab
from tools.recall.oracle import continuation

Tokens = dict[str, list[int]]
PAGE_SIZE = 16


def tokens_of(
    path: str, prompts: list[list[int]], new_tokens: int, *, ahead_pages: int | None = None, **flags: Any
) -> tuple[Tokens, EngineParts]:
    """Return the greedy tokens of `prompts` in float32, and the closed engine. Triton on a CPU runs with eager graphs.

    `ahead_pages`: as of HostCache.
    """
    config = EngineConfig(model_path=path, dtype="float32", **flags)
    eager = config.device == "cpu" and config.attention_backend == "triton"
    capture = EagerCapture if eager else None
    parts = build_engine(config, load_model_config(path), machine=LocalMachine(capture=capture))
    if ahead_pages is not None and (host := parts.scheduler.memory.part(HostCache)) is not None:
        host.ahead_pages = ahead_pages
    run = Run(parts, depth=parts.depth)
    for i, prompt in enumerate(prompts):
        run.add(str(i), prompt=prompt, new_tokens=new_tokens)
    run.drain()
    parts.device.executor.close()
    return run.tokens, parts


# ---- ways of one model

WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "no graphs": {"disable_cuda_graph": True},
    "torch": {"attention_backend": "torch", "disable_cuda_graph": True},
    "chunks": {"chunked_prefill_size": 64},
    "drafts": {"speculative_algorithm": "NGRAM"},
}


def identity(target: Target) -> dict[str, Any]:
    """Compare each way with the CPU, for the model that ships with Tandem and one of random weights; raises where they differ."""
    found = {}
    sizes = {"max_total_tokens": target.pick(4096, 128), "max_running_requests": target.pick(8, 4)}
    draw = random.Random(1)
    # runs of tokens that come twice, each token once in a run: the shipped model has one right way to go on, by a wide margin
    halves = [draw.sample(range(16, 528), n) for n in target.pick((5, 40, 200, 500, 33), (4, 7, 5))]
    prompts = [half + half[: max(2, len(half) // 2)] for half in halves]
    tokens = partial(tokens_of, prompts=prompts, new_tokens=target.pick(48, 4), disable_radix_cache=True, **sizes)
    with tempfile.TemporaryDirectory(prefix="tandem-identity-") as folder:
        write_model(Path(folder), layers=target.pick(4, 1), hidden=target.pick(512, 64))
        for name, path in (("shipped", DEFAULT_MODEL_PATH), ("random", folder)):
            expected, _ = tokens(path, device="cpu", attention_backend="torch")
            for way, flags in target.pick(WAYS, {"graphs": {}}).items():
                at = {"device": target.device.type, "attention_backend": "triton"} | flags
                found[f"{name}, {way}"] = tokens(path, **at)[0] == expected
    if different := [name for name, same in found.items() if not same]:
        raise AssertionError(f"other tokens than on the CPU: {', '.join(different)}")
    return found


# ---- families

BACKENDS: dict[str, dict[str, Any]] = {
    "triton": {"attention_backend": "triton"},
    "torch": {"attention_backend": "torch", "disable_cuda_graph": True},
}
PROMPTS = [[16 + (7 * i + 13 * t) % 250 for t in range(n)] for i, n in enumerate((5, 40, 130))]
PROCESSES = 6


def families(target: Target) -> dict[str, Any]:
    """For each family and backend: "same", or why it was refused at start; raises where tokens differ or a step fails."""
    names = target.pick(list(ARCHITECTURES), ["qwen3"])
    if target.small:
        found = {family: _family(target, family) for family in names}
    else:
        with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
            found = dict(zip(names, pool.map(partial(_family, target), names), strict=True))
    said = {f"{family} by {way}": text for family, ways in found.items() for way, text in ways.items()}
    if wrong := [f"{name}: {text}" for name, text in said.items() if text != "same" and text[:9] != "refused: "]:
        raise AssertionError("; ".join(wrong))
    return found


def _family(target: Target, family: str) -> dict[str, str]:
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory(prefix="tandem-families-") as folder:
        path = str(make_tiny_checkpoint(Path(folder), family))
        flags = {"max_total_tokens": 1024, "max_running_requests": 4, "disable_radix_cache": True}
        tokens = partial(tokens_of, path, PROMPTS, 8, **flags)
        expected, _ = tokens(device="cpu", attention_backend="torch")
        found = {}
        for way, backend in BACKENDS.items():
            try:
                found[way] = "same" if tokens(device=target.device.type, **backend)[0] == expected else "other tokens"
            except ConfigError as error:
                found[way] = f"refused: {error}"
            except Exception as error:
                found[way] = f"{type(error).__name__}: {error}"[:300]
        return found


# ---- host tier


def host_tier(target: Target) -> dict[str, Any]:
    """The copies of the hierarchical cache: the same bytes layer by layer, and the same tokens from the host as computed."""
    return {"bytes_mb": _bytes_mb(target), **_host_tokens(target)}


def _bytes_mb(target: Target) -> float:
    """Copy random pages out, then back to other pages; look at each layer as soon as it has been waited for."""
    spec, layers, num_pages = target.pick(
        (CacheSpec(8, 128, "bfloat16"), 36, 256), (CacheSpec(2, 16, "bfloat16"), 3, 8)
    )
    pool = KVPool([spec] * layers, num_pages=num_pages, page_size=PAGE_SIZE, device=target.device)
    host = HostPool(pool, num_pages=num_pages // 2)
    pool.buffer.view(torch.int64).random_()
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)) + 1
    left, came = order[: num_pages // 2].tolist(), order[num_pages // 2 :].tolist()
    host.copy(1, out=[PageCopy(page, i) for i, page in enumerate(left)], back=[])
    was = pool.buffer.clone()
    item = PlanItem("r", 0, [1], len(came) * PAGE_SIZE, 0, came, sample=True, output_len=0, extend=True)
    back = [PageCopy(page, i) for i, page in enumerate(came)]
    arrival = host.begin(Plan(seq=2, extend=True, items=[item], from_host=back))
    pages, expected = pool.buffer.view(1 + num_pages, -1), was.view(1 + num_pages, -1)[left]
    ends = pool.layer_ends()
    same = []
    for layer, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        arrival.hold(layer)
        same.append((pages[came, begin:end] == expected[:, begin:end]).all())
    target.sync()
    host.wait(2)
    different = [layer for layer, equal in enumerate(same) if not bool(equal)]
    host.close()
    assert arrival.is_held and not different, f"layers that did not come back as they left: {different}"
    return len(back) * pool.page_bytes / 1e6


def _host_tokens(target: Target) -> dict[str, Any]:
    """Prompts whose prefixes the device cannot hold together, twice: with the host tier, and without any cache."""
    count, length, new_tokens = target.pick((8, 1000, 8), (6, 40, 4))
    prompts = [[16 + (31 * f + t * (f + 3)) % 200 for t in range(length)] for f in range(count)] * 2
    flags = {"max_total_tokens": target.pick(4096, 128), "max_running_requests": 2, "page_size": PAGE_SIZE}
    flags |= {"device": target.device.type, "attention_backend": target.pick("triton", "torch")}
    tier: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}
    ways: dict[str, dict[str, Any]] = {
        "no cache": {"disable_radix_cache": True},
        "at admission": {**tier, "ahead_pages": 0},
        "ahead": {**tier, "ahead_pages": 100},
    }
    tokens, counters = {}, {}
    for way, more in ways.items():
        tokens[way], parts = tokens_of(DEFAULT_MODEL_PATH, prompts, new_tokens, **flags, **more)
        host = parts.scheduler.memory.part(HostCache)
        counters[way] = {} if host is None else dict(host.counted)
    different = [way for way in ways if tokens[way] != tokens["no cache"]]
    assert not different, f"other tokens than without a cache: {', '.join(different)}"
    loaded = counters["at admission"]["hicache_loaded_pages"], counters["ahead"]["hicache_loaded_ahead_pages"]
    assert all(loaded), counters
    return {way: counters[way] for way in ways if counters[way]}


# ---- accesses out of bounds

CUDA_BIN = "/usr/local/cuda/bin"
FOUND = 9  # the exit status for a wrong access
SHAPE = Shape(1, 0, 0, 8, 2, 64, 0)
VOCAB = 1031  # odd: the last tile is not full


def sanitizer(target: Target) -> dict[str, Any]:
    """Run attention's kernels and the sampler under NVIDIA's memcheck, which is some hundred times slower; raises if it finds something."""
    if target.small:
        use_kernels(target)
        return {"errors": None, "checked": False}
    tool = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:{CUDA_BIN}")
    if tool is None:
        raise FileNotFoundError("compute-sanitizer: not on PATH; it comes with the CUDA toolkit")
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND), sys.executable, "-m", __spec__.name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"memcheck ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-500:]}")
    return {"errors": 0, "checked": True}


def use_kernels(target: Target) -> None:
    """Extend, decode, and a sample of each kind."""
    worst_error(target, SHAPE, target.dtype, lengths=target.pick([1, 19, 130], [1, 19]))
    sampler = make_sampler(num_slots=len(KINDS), vocab_size=VOCAB, device=torch.device(target.device))
    for slot, flags in enumerate(KINDS.values()):
        sampling = SamplingParams(max_new_tokens=8, ignore_eos=True, seed=slot, **flags)
        sampler.open(SlotOpen(slot=slot, sampling=sampling, prompt_ids=[1], output_ids=[], eos_ids=()))
    logits = torch.randn(len(KINDS), VOCAB, device=target.device)
    for step in range(2):
        sampler.sample(logits, list(range(len(KINDS))), [step] * len(KINDS))
    target.sync()


# ---- a cluster

ANSWER = 16


def cluster(target: Target) -> dict[str, Any]:
    """`tandem up` on one GPU, as a user starts it: a prefill and a decode worker share it, and KV crosses by NIXL.

    Asks the shipped model, whose answers are right only if KV crossed, and says what the transfer engine took.
    """
    with tandem_up(*target.pick(("--device", "cuda", "--share-gpus"), ("--device", "cpu"))) as up:
        ids = [_prompt(seed, words=40 + 40 * seed) for seed in range(target.pick(32, 2))]
        sampling = {"max_new_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        answers = post(up.url, {"input_ids": ids, "sampling_params": sampling})
        right = [continuation(prompt, ANSWER, ignore_eos=True) for prompt in ids]
        wrong = [i for i, answer in enumerate(answers) if answer["output_ids"] != right[i]]
        if wrong:
            raise AssertionError(f"wrong answers: {wrong}")
        workers = {role: _server_info(url) for role, url in up.workers}
    return {"answers": len(ids), "ready_s": up.ready_s, "workers": workers}


def _prompt(seed: int, *, words: int) -> list[int]:
    """Pairs of a key and a value, then a key again: `words` tokens or as many as there are keys."""
    known = random.Random(seed).sample(range(16, vocab.VOCAB_SIZE), min(words, vocab.VOCAB_SIZE - 16))
    return [vocab.BOS, *known, known[0]]


def _server_info(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/server_info", timeout=10) as response:
        info = json.load(response)
    return {key: value for key, value in info.items() if key.startswith(("memory_", "transfer", "kv_", "device"))}


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    use_kernels(Target(small=False, limits={}))
