"""Workers of different shapes share KV, whole or layer by layer, and get back what was retracted; all shapes over real processes:
`make rank-shapes`."""

import math
import random
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.e2e.models.group_models import Made
from tests.e2e.two_engines import System, disaggregated, run
from tests.e2e.workload import recall_prompt
from tools.recall.oracle import continuation

FLAGS: dict[str, Any] = {
    "chunked_prefill_size": 32,
    "kv_units": 4,
    "num_threads": 1,
    "schedule_conservativeness": 0.0,
    "max_total_tokens": 4096,
}
TIGHT = {"max_total_tokens": 464}  # of decode: what runs is retracted
Shape = tuple[int, int]  # --tp-size, --pp-size


@dataclass(frozen=True)
class Cell:
    """`backup`: where the KV of a retracted request comes from. `nnodes`: machines of each side. `checksum`: of KV."""

    backend: str
    prefill: Shape
    decode: Shape
    layerwise: str
    backup: str
    nnodes: tuple[int, int] = (1, 1)
    checksum: bool = True


def name_of(cell: Cell) -> str:
    """Its shapes and engine."""
    prefill, decode = (
        "one" if tp * pp == 1 else f"PP {pp}" if pp > 1 else f"TP {tp}" for tp, pp in (cell.prefill, cell.decode)
    )
    return f"{prefill} to {decode} by {cell.backend}"


def both_ways(what: str, made: Made, one: Shape, other: Shape) -> list[ParameterSet]:
    """Each direction by each engine: by layers and through prefill, or whole and computed again.

    `make slow-tests` tries there by the second engine, and back by the first.
    """
    ways = (("nixl", "on", "prefill"), ("mooncake", "off", "recompute"))
    directions = dict.fromkeys(((one, other), (other, one)))
    found = []
    for (there, shapes), (engine, (backend, *how)) in product(enumerate(directions), enumerate(ways)):
        cell = Cell(backend, *shapes, *how)
        marks = () if there == engine else pytest.mark.slow
        found.append(pytest.param(made, cell, id=f"{what}, {name_of(cell)}", marks=marks))
    return found


# How decode computes it by itself: tests/engine/ranks/test_ranks.py
CELLS = {
    "TP 2 to TP 2": Cell("nixl", (2, 1), (2, 1), "on", "prefill"),
    "one to TP 2": Cell("mooncake", (1, 1), (2, 1), "off", "host"),
    "PP 2 to PP 2": Cell("nixl", (1, 2), (1, 2), "on", "prefill"),
    "TP 2 to PP 2": Cell("mooncake", (2, 1), (1, 2), "on", "host"),
    "two machines to one": Cell("nixl", (2, 1), (1, 1), "on", "prefill", (2, 1)),
    "one to four machines": Cell("mooncake", (1, 1), (4, 1), "off", "host", (1, 4)),
}


@pytest.mark.parametrize("name", CELLS)
def test_kv_crosses_between_all_ranks_and_comes_back(name: str) -> None:
    cell, rng = CELLS[name], random.Random(4)
    asked = [(f"r{i}", recall_prompt(rng, 40), 44 - 4 * i) for i in range(4)]
    with pair_of(cell) as pair:
        assert run(pair, asked, together=4, turns_between=6) == {
            rid: continuation(prompt, new, ignore_eos=True) for rid, prompt, new in asked
        }
        sent, received = (worker.role.counters() for worker in pair.workers)
        prefill, decode = (worker.parts for worker in pair.workers)
        layers = prefill.device.layers.watched
    again = received.get("resumed_through_prefill", 0)
    back = again if cell.backup == "prefill" else decode.scheduler.counters.resumed_restored
    assert back > 0 and decode.scheduler.counters.resumed_computed == 0
    assert received["kv_checksum_verified"] == sent["kv_transfers"] == len(asked) + again
    assert (sent.get("posts_of_followers", 0) > 0) == (cell.prefill != (1, 1))
    assert layers == (cell.layerwise == "on")
    whole = sent["kv_transfers"] * max(map(math.prod, (cell.prefill, cell.decode)))  # one each between ranks of a pair
    assert (sent["posts"] > 2 * whole) == layers, (sent["posts"], whole)


def pair_of(
    cell: Cell,
    path: str = WIDE_MODEL_PATH,
    *,
    flags: Mapping[str, Any] = MappingProxyType(FLAGS),
    decode: Mapping[str, Any] = MappingProxyType(TIGHT),
    disagg: Mapping[str, Any] = MappingProxyType({}),
) -> AbstractContextManager[System]:
    """`flags`, `disagg`: of both workers; `decode`: of that one alone."""
    disagg = {
        **disagg,
        "disaggregation_transfer_backend": cell.backend,
        "disaggregation_kv_checksum": cell.checksum,
        "disaggregation_layerwise_transfer": cell.layerwise,
        "disaggregation_decode_retraction_backup": cell.backup,
    }
    one, other = (
        {"tp_size": tp, "pp_size": pp, "nnodes": nnodes, "dist_init_addr": "127.0.0.1:1"}  # they meet by hand
        for (tp, pp), nnodes in zip((cell.prefill, cell.decode), cell.nnodes, strict=True)
    )
    return disaggregated(path, prefill=one, decode={**decode, **other}, disagg=disagg, **flags)
