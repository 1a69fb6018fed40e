"""Grouped kernels of adapters: numerics by the interpreter, and what the compiler makes of them for an H100/H200."""

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch
from triton.runtime.jit import JITFunction

from engine.config import EngineConfig
from engine.core.plan import PlanItem, SlotOpen
from engine.device.graphs import GRAPH_BYTES, LOGIT_BYTES, graph_bytes
from engine.kernels.triton.lora import (
    DECODE_TILES,
    EXTEND_TILES,
    LoraTiles,
    expand_constants,
    lora_expand_kernel,
    lora_shrink_kernel,
    shrink_constants,
    site_constants,
)
from engine.layers.linear import SiteShape
from engine.lora.bank import AdapterBank, Run, SlicedAdapters, adapter_runs, max_tiles, row_tiles
from engine.lora.grouped import GroupedAdapters
from engine.lora.weights import AdapterWeights
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from engine.sampling_params import SamplingParams
from tests.attention.triton.interpreted import TIMEOUT_S, run_interpreted
from tests.attention.triton.test_specialization import recorder
from tests.attention.triton.test_triton import Made, check_compiled, own_directory  # noqa: F401 (a fixture of every test here)
from tests.cells import in_turn

SITES = {"qkv": (4096, [4096, 1024, 1024]), "down": (12288, [4096])}  # of Qwen3-8B
SHAPES = {"decode": DECODE_TILES, "extend": EXTEND_TILES}
MAX_REGISTERS = {"decode": 96, "extend": 168}


@pytest.mark.timeout(TIMEOUT_S)
def test_adapters_by_the_interpreter() -> None:
    run_interpreted("tests.lora.grouped_by_the_interpreter")


@pytest.mark.parametrize(("site", "shape"), in_turn([*SITES], [*SHAPES]))
def test_they_compile_for_sm_90_without_spills(site: str, shape: str) -> None:
    (width, parts), tiles = SITES[site], SHAPES[shape]
    constants = site_constants(width=width, rows=parts, sites=144, max_rank=64, dtype=torch.bfloat16)
    for made in (shrink(constants, width, tiles), expand(constants, parts, tiles)):
        assert "mma" in made.asm["ptx"], "tensor cores are idle"
        assert "cp.async" in made.asm["ptx"] and "ld.global.b16" not in made.asm["ptx"], "loads are narrow"
        assert made.usage["REG"] <= MAX_REGISTERS[shape], made.usage


def test_what_a_day_launches_was_compiled_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches a site, of one kernel each; rows, tiles, adapters and ranks make no other."""
    keys: dict[str, set[str]] = defaultdict(set)
    shapes = [
        SiteShape(width, tuple((str(i), rows) for i, rows in enumerate(parts))) for width, parts in SITES.values()
    ]
    steps = GroupedAdapters(shapes, places=4, max_rank=64, dtype=torch.bfloat16, device=torch.device("cpu"))
    monkeypatch.setattr(JITFunction, "run", recorder(keys))
    steps.compile()
    compiled = {name: set(found) for name, found in keys.items()}
    assert {name: len(found) for name, found in compiled.items()} == {  # by site and kind of step
        "lora_shrink_kernel": len(SITES) * len(SHAPES),
        "lora_expand_kernel": len(SITES) * len(SHAPES),
    }
    rng = random.Random(0)
    for number in range(1, 7):
        steps.add(number, AdapterWeights((None,) * len(shapes), max_rank=rng.randint(1, 64), digest=""))
    steps.begin_recording(48)
    for _ in range(40):
        lengths = rng.choices([1, 1, 16, 300], k=rng.randint(1, 16))
        recorded = 48 if max(lengths) == 1 and rng.random() < 0.5 else None
        chosen = rng.sample(range(1, 7), 4)
        steps.begin(adapter_runs((rng.choice([0, *chosen]), n) for n in lengths), recorded=recorded)
        total = recorded or sum(lengths)
        for index, (width, parts) in enumerate(SITES.values()):
            x, y = torch.empty(total, width, dtype=torch.bfloat16), torch.empty(total, sum(parts), dtype=torch.bfloat16)
            steps.delta(index)(x, y)
    assert keys == compiled


@pytest.mark.parametrize("lora", [False, True])
def test_the_reserve_for_graphs_knows_those_with_adapters(lora: bool) -> None:
    config = EngineConfig(enable_lora=lora, max_running_requests=8)
    model = load_model_config(DEFAULT_MODEL_PATH)
    steps = graph_bytes(config, model, prefills=False, row_bytes=0) - LOGIT_BYTES * 8 * model.vocab_size
    assert steps == 4 * (1 + lora) * GRAPH_BYTES  # batches of 1, 2, 4, 8


def shrink(site: dict[str, int], width: int, tiles: LoraTiles) -> Made:
    signature = {"x_ptr": "*bf16", "low_ptr": "*fp32", **PLANNED, "x_stride": "i32"}
    constants = shrink_constants(site, width=width, tiles=tiles)
    return compiled(lora_shrink_kernel, signature, constants, tiles, aligned=["x_stride"])


def expand(site: dict[str, int], parts: list[int], tiles: LoraTiles) -> Made:
    signature = {"low_ptr": "*fp32", "y_ptr": "*bf16", **PLANNED, "y_stride": "i32"}
    constants = expand_constants(site, rows=parts, tiles=tiles)
    return compiled(lora_expand_kernel, signature, constants, tiles, aligned=["y_stride"])


PLANNED = {"table_ptr": "*i64", "tiles_ptr": "*i32", "rows_ptr": "*i32", "total": "i32"}


def compiled(
    kernel: object, signature: dict[str, str], constants: dict[str, int], tiles: LoraTiles, *, aligned: list[str]
) -> Made:
    launch = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return check_compiled(kernel, signature, constants, aligned=aligned, **launch, streams=False)  # type: ignore[no-any-return]


# ---- Rows of a step by adapter: each row with an adapter is in one tile, and no other row is.


def test_tiles_cover_the_rows_of_each_adapter_and_no_other() -> None:
    rng = random.Random(0)
    for _ in range(300):
        places = [rng.randrange(4) for _ in range(rng.randrange(1, 50))]  # of each row; 0: none
        runs = [(place, slice(row, row + 1)) for row, place in enumerate(places) if place]
        rows, tiles = row_tiles(runs, tile_rows=16)
        covered = {}
        for place, first, count, _ in tiles:
            assert 1 <= count <= 16
            for row in rows[first : first + count]:
                assert row not in covered
                covered[row] = place
        assert covered == {row: place for row, place in enumerate(places) if place}
        assert len(tiles) <= max_tiles(len(places), places=3, tile_rows=16)


def test_runs_of_one_adapter_share_tiles() -> None:
    rows, tiles = row_tiles([(2, slice(4, 6)), (0, slice(6, 26)), (2, slice(30, 31))], tile_rows=16)
    assert rows == [*range(6, 26), 4, 5, 30]
    assert tiles == [(0, 0, 16, 0), (0, 16, 4, 0), (2, 20, 3, 0)]


def test_the_bound_is_reached() -> None:
    """Two adapters with one row beyond a tile each."""
    _, tiles = row_tiles([(0, slice(0, 17)), (1, slice(17, 34))], tile_rows=16)
    assert len(tiles) == max_tiles(34, places=2, tile_rows=16) == 4


class LastRuns(SlicedAdapters):
    def begin(self, runs: Sequence[Run], *, recorded: int | None) -> None:
        self.runs = list(runs)


def test_steps_of_other_weights_are_recorded_without_the_last_ones_rows() -> None:
    bank = AdapterBank(steps := LastRuns())
    bank.open(SlotOpen(slot=0, sampling=SamplingParams(), prompt_ids=[1], output_ids=[], eos_ids=(), adapter=1))
    item = PlanItem(
        rid="", slot=0, tokens=[1], start=0, page_start=0, new_pages=[], sample=True, output_len=0, extend=True
    )
    assert bank.begin([item])
    bank.compute()
    assert steps.runs
    bank.attach([])
    assert not steps.runs
