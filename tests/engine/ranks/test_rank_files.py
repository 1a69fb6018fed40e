"""Files of the hierarchical cache with several ranks: each rank's part of a page comes back to it, or the page is computed again."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from engine.core.mem_cache.page_allocator import is_state
from engine.hicache.page_files import HEADER_BYTES
from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.cells import some
from tests.e2e.models.group_models import DELTA_RULE
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import engine_of
from tests.engine.test_host_tier import counters, settle
from tests.models.tiny_checkpoints import make_tiny_checkpoint

PROMPTS = [prompt_of(60 + i, 20 + i) for i in range(4)]
PAGES = sum((len(prompt) - 1) // 4 for prompt in PROMPTS)  # whole ones that a prompt can be read from
DEADLINE_S = 60.0


def engine_in(
    folder: Path, tp_size: int, pp_size: int, *, model: str = WIDE_MODEL_PATH, **more: Any
) -> AbstractContextManager[EngineInProcess]:
    flags: dict[str, Any] = {
        "page_size": 4,
        "max_total_tokens": 512,
        "chunked_prefill_size": 32,
        "num_threads": 1,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_storage_dir": str(folder),
        "hicache_storage_prefetch_policy": "wait_complete",
        **more,
    }
    return engine_of(model, tp_size=tp_size, pp_size=pp_size, **flags)


def answers(engine: EngineInProcess) -> list[list[int]]:
    return tokens_of(engine, PROMPTS)


def tokens_of(engine: EngineInProcess, prompts: list[list[int]]) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, max_new_tokens=6)
        settle(engine)
    return [engine.tokens[str(i)] for i in range(len(prompts))]


def files_of(folder: Path) -> dict[str, set[str]]:
    """Names of the page files in each folder that has any."""
    found: dict[str, set[str]] = {}
    for file in (folder / "0").rglob("*.kv"):
        found.setdefault(file.parent.name, set()).add(file.name)
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with engine_in(tmp_path_factory.mktemp("alone"), 1, 1) as engine:
        return answers(engine)


@pytest.mark.parametrize(("tp_size", "pp_size"), some([(2, 1), (1, 2), (2, 2)], tried=[(2, 2)]))
def test_another_life_reads_what_every_rank_has_written(
    tp_size: int, pp_size: int, tmp_path: Path, expected: list[list[int]]
) -> None:
    with engine_in(tmp_path, tp_size, pp_size) as engine:
        assert answers(engine) == expected
        written = counters(engine)["hicache_written_pages"]
    files = files_of(tmp_path)
    assert set(files) == {f"rank{rank}" for rank in range(tp_size * pp_size)}
    assert len(set(map(frozenset, files.values()))) == 1 and len(files["rank0"]) == written > PAGES

    with engine_in(tmp_path, tp_size, pp_size) as engine:
        assert answers(engine) == expected
        assert counters(engine)["hicache_disk_hit_tokens"] == 4 * PAGES
        assert counters(engine)["hicache_bad_files"] == 0
        assert engine.parts.scheduler.flush_cache()
        settle(engine)
    assert files_of(tmp_path) == {}


def test_files_of_other_weights_are_found_under_them_alone(tmp_path: Path) -> None:
    """Every rank names its files by the weights that it has at that time."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 128}
    first, second = (make_tiny_checkpoint(tmp_path / f"{seed}", "qwen3", seed=seed, **sizes) for seed in (1, 2))
    folder = tmp_path / "files"
    with engine_in(tmp_path / "none", 2, 1, model=second) as engine:
        expected = answers(engine)
    with engine_in(folder, 2, 1, model=first) as engine:
        before, weights = answers(engine), engine.parts.weights
        model = weights.read(second, when_done=lambda: None).result(DEADLINE_S)
        engine.parts.scheduler.forget_prefixes()
        weights.take(model, model_path=second, version=None)
        engine.tokens.clear()
        assert answers(engine) == expected != before
        assert counters(engine)["hicache_disk_hit_tokens"] == 0
    for model, wanted in ((first, before), (second, expected)):
        with engine_in(folder, 2, 1, model=model) as engine:
            assert answers(engine) == wanted
            assert counters(engine)["hicache_disk_hit_tokens"] == 4 * PAGES
            assert counters(engine)["hicache_bad_files"] == 0


def remove(file: Path) -> None:
    file.unlink()


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(("harm", "when", "rank"), [(remove, "before", 1), (remove, "while", 0), (damage, "while", 1)])
def test_a_part_that_is_gone_or_wrong_at_one_rank_is_a_miss_for_all(
    harm: Callable[[Path], None], when: str, rank: int, tmp_path: Path, expected: list[list[int]]
) -> None:
    """The leader's rank is 0. What the others have of such a page is deleted."""
    with engine_in(tmp_path, 2, 1) as engine:
        answers(engine)
    broken = sorted((tmp_path / "0" / f"rank{rank}").glob("*.kv"))
    if when == "before":
        [harm(file) for file in broken]
    with engine_in(tmp_path, 2, 1) as engine:
        if when == "while":
            [harm(file) for file in broken]
        assert answers(engine) == expected
        assert counters(engine)["hicache_disk_hit_tokens"] == 0
        assert (counters(engine)["hicache_bad_files"] > 0) == (when == "while")
    files = files_of(tmp_path)
    unread = (
        len(broken) - PAGES if harm is remove and when == "while" else 0
    )  # the next start deletes what is left of them
    assert len(files["rank0"] ^ files["rank1"]) == unread


def test_a_page_that_one_rank_cannot_write_is_in_no_file(tmp_path: Path, expected: list[list[int]]) -> None:
    with engine_in(tmp_path, 2, 1) as engine:
        (tmp_path / "0" / "rank1").rmdir()
        assert answers(engine) == expected
        assert counters(engine)["hicache_failed_writes"] > 0 == counters(engine)["hicache_written_pages"]
        assert files_of(tmp_path) == {}


def test_the_limit_is_of_all_ranks_and_what_another_shape_has_left_goes(tmp_path: Path) -> None:
    limit_gb = 2e-4
    for tp_size in (2, 1, 2):
        with engine_in(tmp_path, tp_size, 1, hicache_storage_size_gb=limit_gb) as engine:
            answers(engine)
        files = list((tmp_path / "0").rglob("*.kv"))
        assert {file.parent.name for file in files} == ({"rank0", "rank1"} if tp_size == 2 else {"0"})
        assert limit_gb * 0.8e9 < sum(file.stat().st_size for file in files) <= limit_gb * 1e9


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
def test_every_rank_has_its_part_of_a_recurrent_state(tp_size: int, pp_size: int, tmp_path: Path) -> None:
    family, fields = DELTA_RULE
    model = make_tiny_checkpoint(tmp_path / family, family, **fields)
    flags: dict[str, Any] = {"model": model, "page_size": 16, "chunked_prefill_size": 64, "max_running_requests": 4}
    prompts = [prompt_of(90 + i, 20 + i) for i in range(3)]
    with engine_in(tmp_path / "alone", 1, 1, **flags) as engine:
        right = tokens_of(engine, prompts)
    for life in range(2):
        with engine_in(tmp_path / "files", tp_size, pp_size, **flags) as engine:
            assert tokens_of(engine, prompts) == right
            assert counters(engine)["hicache_disk_hit_tokens"] == life * 3 * 64
            assert counters(engine)["hicache_bad_files"] == 0
    for rank in range(2):
        files = (tmp_path / "files/0" / f"rank{rank}").glob("*.kv")
        states = [file.read_bytes()[HEADER_BYTES:] for file in files if is_state(bytes.fromhex(file.stem))]
        assert len(states) == 3 and all(map(any, states)), f"rank {rank}: something of each"
