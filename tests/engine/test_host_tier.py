"""The host tier with real KV: tokens are those of an engine without any cache, whichever tier a prefix comes from."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core.mem_cache.host_cache import HostCache
from engine.core.plan import PageCopy, Plan, PlanItem
from engine.core.request import Variant
from engine.flags.hicache import ahead_pages, host_pages
from engine.flags.resolve import backup_pages, resolve
from engine.kv.cache_spec import CacheSpec
from engine.kv.host_pool import HostPool
from engine.kv.kv_pool import KVPool, fingerprint, weights_number
from engine.lora.bank import LoraStore
from engine.model_files.model_config import load_model_config
from service.flags import ConfigError
from tests.engine.device.late_copies import copy_late
from tests.engine.engine_in_process import EngineInProcess
from tests.lora.tiny_adapters import make_tiny_adapter
from tests.models.tiny_checkpoints import make_tiny_checkpoint

TINY = {"page_size": 4, "max_total_tokens": 160, "chunked_prefill_size": 32}
PROMPTS = [[16 + (7 * family + i) % 250 for i in range(70)] + [20 + i] for family in range(5) for i in range(3)]
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[list[int]]:
    engine = EngineInProcess(checkpoint, disable_radix_cache=True, page_size=4, max_total_tokens=4096)
    return answers(engine)


Start = Callable[..., EngineInProcess]


@pytest.fixture
def start(checkpoint: str) -> Iterator[Start]:
    """Starts engines that end with the test."""
    common = {**TINY, "enable_hierarchical_cache": True}
    with contextlib.ExitStack() as stack:
        yield lambda **flags: stack.enter_context(EngineInProcess(checkpoint, **{**common, **flags}))


def answers(engine: EngineInProcess) -> list[list[int]]:
    """One request after the other, two at a time."""
    before = len(engine.tokens)
    for at in range(0, len(PROMPTS), 2):
        for i, prompt in enumerate(PROMPTS[at : at + 2], at):
            engine.add(f"{before}-{i}", prompt, max_new_tokens=6)
        engine.run()
    return [engine.tokens[f"{before}-{i}"] for i in range(len(PROMPTS))]


def counters(engine: EngineInProcess) -> dict[str, int]:
    host = engine.parts.scheduler.memory.part(HostCache)
    assert host is not None
    return host.counted


def settle(engine: EngineInProcess) -> None:
    """Until the disk threads have done what they were given."""
    host = engine.parts.scheduler.memory.part(HostCache)
    assert host is not None
    deadline_s = time.monotonic() + DEADLINE_S
    tiers = [tier for tier in (host.pages, host.states) if tier is not None]
    while engine.turn() or any(tier.is_pinned(tier.first + i) for tier in tiers for i in range(tier.num_pages)):
        assert time.monotonic() < deadline_s, "the disk does not come to rest"
        os.sched_yield()


def files(path: Path) -> list[Path]:
    return sorted((path / "0").glob("*.kv"))


def bytes_in(path: Path) -> int:
    """At the moment when all names had been listed, or less: what is deleted meanwhile does not count."""
    total = 0
    for file in files(path):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("stream", ["inline", "threaded", "late copies"])
def test_tokens_are_the_same_when_prefixes_come_back_from_the_host(
    policy: str, stream: str, start: Start, expected: list[list[int]]
) -> None:
    late = stream == "late copies"
    engine = start(hicache_write_policy=policy, stream="inline" if late else stream, hicache_ratio=4.0)
    if late:
        copy_late(engine)
    assert answers(engine) == answers(engine) == expected
    assert counters(engine)["hicache_host_hit_tokens"] >= 5 * 68, "prefixes came back"
    assert sum(engine.cached.values()) == sum(
        counters(engine)[f"hicache_{tier}_hit_tokens"] for tier in ("device", "host", "disk")
    )


def test_the_folder_never_holds_more_than_its_limit(start: Start, tmp_path: Path) -> None:
    engine = start(hicache_storage_dir=str(tmp_path), hicache_storage_size_gb=1e-4)
    for i, prompt in enumerate(PROMPTS):
        engine.add(f"r{i}", prompt, max_new_tokens=2)
        while engine.turn():
            assert bytes_in(tmp_path) <= 1e5
    settle(engine)
    assert 5e4 < bytes_in(tmp_path) <= 1e5


def test_other_weights_do_not_find_the_kv_of_the_first(start: Start, tmp_path: Path) -> None:
    disk = {"hicache_storage_dir": str(tmp_path / "disk"), "hicache_ratio": 4.0}
    engine = start(**disk)
    answers(engine)
    settle(engine)
    other = make_tiny_checkpoint(tmp_path / "other", "qwen3", seed=1)
    weights = engine.parts.weights
    model = weights.read(other, when_done=lambda: None).result(timeout=DEADLINE_S)
    engine.parts.scheduler.forget_prefixes()
    weights.take(model, model_path=other, version=None)  # under the same name
    fresh = EngineInProcess(other, disable_radix_cache=True, page_size=4, max_total_tokens=4096)
    assert answers(engine) == answers(fresh)
    assert engine.cached[f"{len(PROMPTS)}-0"] == 0


def test_an_adapter_finds_its_kv_by_its_weights(checkpoint: str, tmp_path: Path) -> None:
    """In another process, under another number; the number of the first has another adapter's KV there."""
    paths = [make_tiny_adapter(tmp_path / str(seed), checkpoint, seed=seed) for seed in (1, 2)]
    disk = {"hicache_storage_dir": str(tmp_path / "disk"), "hicache_storage_prefetch_policy": "wait_complete"}
    found = list[tuple[list[int], int]]()
    for worker in (paths[:1], paths[::-1]):
        with EngineInProcess(checkpoint, **TINY, **disk, enable_hierarchical_cache=True, enable_lora=True) as engine:
            store = engine.parts.adapters
            assert isinstance(store, LoraStore)
            for number, path in enumerate(worker, 1):
                digest = store.install(number, store.read(path))
                engine.add(path, PROMPTS[0], wanted={"variant": Variant(number, digest)})
                engine.run()
                settle(engine)
                found.append((engine.tokens[path], engine.cached[path]))
    (first, _), (other, of_other), (again, from_file) = found
    assert first == again != other
    assert (of_other, from_file) == (0, 68)


def test_checkpoints_differ_by_what_is_in_them_even_where_names_sizes_and_times_agree(tmp_path: Path) -> None:
    first, second = (make_tiny_checkpoint(tmp_path / str(seed), "qwen3", seed=seed) for seed in (1, 2))
    for file in [*Path(first).iterdir(), *Path(second).iterdir()]:
        os.utime(file, ns=(1, 1))
    assert fingerprint(first) != fingerprint(second)
    moved = Path(first).rename(tmp_path / "moved")
    before = fingerprint(str(moved))
    number = weights_number(str(moved))
    assert number != weights_number(second)
    os.utime(moved / "model.safetensors", ns=(2, 2))
    assert fingerprint(str(moved)) != before
    assert weights_number(str(moved)) == number, "a copy on another machine has other times"


BAD = {
    "needs the radix cache": {"enable_hierarchical_cache": True, "disable_radix_cache": True},
    "needs --enable-hierarchical-cache": {"hicache_storage_dir": "/tmp/x"},
}


@pytest.mark.parametrize(("message", "flags"), BAD.items(), ids=BAD.keys())
def test_a_bad_flag_is_an_error_that_names_it(message: str, flags: dict[str, object], checkpoint: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(model_path=checkpoint, **flags), load_model_config(checkpoint), cuda=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "pages"), [("cpu", 0), ("cuda", 213)])
def test_a_step_loads_whole_pages_ahead_where_copies_run_beside_it(device: str, pages: int) -> None:
    config = EngineConfig(device=device)
    assert ahead_pages(config, page_bytes=300_000) == pages
    assert ahead_pages(config, page_bytes=10**9) == min(1, pages)


def pages_of(**flags: float) -> int:
    return host_pages(EngineConfig(**flags), num_pages=100, page_bytes=1000, free_bytes=500_000)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "free_bytes", "pages"), [("cpu", 0, 100), ("cuda", 10**6, 100), ("cuda", 150_000, 75), ("cuda", 1999, 0)]
)
def test_backups_take_the_pool_once_more_but_pin_at_most_half_of_the_free_memory(
    device: str, free_bytes: int, pages: int
) -> None:
    assert backup_pages(EngineConfig(device=device), num_pages=100, page_bytes=1000, free_bytes=free_bytes) == pages


def test_host_pages_follow_the_ratio_or_the_size() -> None:
    assert pages_of(hicache_ratio=1.5) == 150
    assert pages_of(hicache_ratio=1.5, hicache_size=0.0004) == 400
    with pytest.raises(ConfigError, match=r"--hicache-ratio 6\.0: .* are free; lower it"):
        pages_of(hicache_ratio=6.0)
    with pytest.raises(ConfigError, match="--hicache-size 1e-09: holds no page"):
        pages_of(hicache_size=1e-9)


# ---- Pages to the host tier and back, byte for byte.


def test_pages_come_back_elsewhere_as_they_were() -> None:
    specs = [CacheSpec(num_kv_heads=2, head_dim=8, dtype="float32")] * 3
    pool = KVPool(specs, num_pages=9, page_size=4, device="cpu", units=2)
    pages = pool.buffer.view(10, -1)
    pages.copy_(torch.randint(0, 256, pages.shape, dtype=torch.uint8))
    was, host = pages.clone(), HostPool(pool, num_pages=6)
    out = [PageCopy(page=5, host_page=1), PageCopy(page=2, host_page=2), PageCopy(page=8, host_page=5)]
    host.copy(1, out=out, back=[])
    assert bytes(host.page(2)) == was[2].numpy().tobytes()
    pages.zero_()
    back = [PageCopy(page=9, host_page=1), PageCopy(page=4, host_page=2), PageCopy(page=1, host_page=5)]
    host.copy(2, out=[], back=back)
    expected = torch.zeros_like(was)
    expected[9], expected[4], expected[1] = was[5], was[2], was[8]
    assert torch.equal(pages, expected)


def test_what_goes_out_may_be_loaded_in_the_same_step() -> None:
    pool = small_pool()
    pages = pool.buffer.view(4, -1)
    pages[1] = 7
    HostPool(pool, num_pages=1).copy(1, out=[PageCopy(1, 0)], back=[PageCopy(2, 0)])
    assert torch.equal(pages[2], pages[1]) and int(pages[3].sum()) == 0


@pytest.mark.parametrize(
    ("start", "page_start", "guarded"),
    [(0, 0, [5, 6, 7]), (8, 0, [7]), (9, 0, [7]), (8, 2, [5, 6, 7]), (12, 0, [])],
)
def test_a_step_guards_the_pages_that_it_is_the_first_to_write(
    start: int, page_start: int, guarded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of 4 tokens: what lies before `start` is read only."""
    host, seen = HostPool(small_pool(), num_pages=1), list[int]()
    monkeypatch.setattr(host._copies, "guard", seen.extend)
    host.begin(Plan(1, extend=True, items=[item(start=start, page_start=page_start, new_pages=[5, 6, 7])]))
    assert seen == guarded


def small_pool() -> KVPool:
    return KVPool([CacheSpec(num_kv_heads=1, head_dim=8, dtype="float32")], num_pages=3, page_size=4, device="cpu")


def item(*, start: int, page_start: int, new_pages: list[int]) -> PlanItem:
    return PlanItem("r", 0, [1], start, page_start, new_pages, sample=True, output_len=0, extend=True)
