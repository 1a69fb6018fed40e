"""All model families, served in every way: what works is in the table of docs/models.md, which `make model-table` writes.

A way that works gives the tokens of one engine which computes each prompt whole and caches nothing; tests/engine/test_parity.py
compares that engine with transformers. A way that does not work is refused when the engine is built, or the adapter read.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm

from engine.kernels.linear import linear_kernel
from service.flags import ConfigError
from tests.e2e.two_engines import disaggregated, run
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import ranks
from tests.lora.tiny_adapters import make_tiny_adapter
from tests.models.tiny_checkpoints import ARCHITECTURES, make_tiny_checkpoint
from tests.packages import ROOT

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- model table: make model-table -->\n", "<!-- end of the table -->\n"
SYSTEM = prompt_of(70, 9)
PROMPTS = {f"r{i}": [*SYSTEM, *prompt_of(4 + 9 * i, i)] for i in range(3)}
NEW = 6
CHUNK = 64  # where prompts of recurrent models may be cut
FLAGS: Mapping[str, Any] = {"page_size": 4, "max_total_tokens": 1024, "max_running_requests": 8, "num_threads": 1}

Tokens = dict[str, list[int]]


class Served:
    """A family's tiny checkpoint. Each way raises ConfigError where it is refused, AssertionError where its tokens are wrong."""

    def __init__(self, family: str, folder: Path) -> None:
        self._folder = folder
        self._path = make_tiny_checkpoint(folder / family, family)
        self._right = self._tokens(chunked_prefill_size=-1, disable_radix_cache=True)

    def chunked(self) -> None:
        assert self._tokens(chunked_prefill_size=CHUNK, disable_radix_cache=True) == self._right

    def cached(self) -> None:
        with EngineInProcess(self._path, **FLAGS) as engine:
            for rid, prompt in PROMPTS.items():
                engine.add(rid, prompt, max_new_tokens=NEW)
                engine.run()
            assert engine.tokens == self._right
            assert engine.cached["r2"] >= len(SYSTEM) // 2, engine.cached

    def retracted(self) -> None:
        with EngineInProcess(self._path, chunked_prefill_size=CHUNK, test_retract=2, **FLAGS) as engine:
            assert _ask(engine) == self._right
            assert engine.parts.scheduler.counters.retractions

    def two_ranks(self) -> None:
        with ranks(self._path, tp_size=2, **FLAGS) as group:
            assert _ask(group.engine) == self._right

    def two_stages(self) -> None:
        with ranks(self._path, pp_size=2, **FLAGS) as group:
            assert _ask(group.engine) == self._right

    def by_nixl(self) -> None:
        self._disaggregated("nixl")

    def by_mooncake(self) -> None:
        self._disaggregated("mooncake")

    def adapted(self) -> None:
        folder = self._folder / "adapter"
        adapter = make_tiny_adapter(folder, self._path, seed=1, targets=("o_proj", "dense"), lora_alpha=64)
        with EngineInProcess(self._path, enable_lora=True, **FLAGS) as engine:
            store = engine.parts.device.adapters
            assert store is not None
            store.install(1, store.read(adapter))
            changed = _ask(engine, adapter=1)
            assert changed != self._right
            engine.tokens.clear()
            assert _ask(engine) == self._right

    def quantized(self) -> None:
        """Rounded weights have tokens of their own, which two engines share."""
        assert self._tokens(dtype="bfloat16", quantization="int8wo", chunked_prefill_size=-1) == self._tokens(
            dtype="bfloat16", quantization="int8wo", chunked_prefill_size=CHUNK
        )

    def small_cache(self) -> None:
        """Rounded KV has tokens of its own, which a prompt in parts and a cached one share."""
        flags: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}
        whole = self._tokens(**flags, chunked_prefill_size=-1, disable_radix_cache=True)
        assert self._tokens(**flags, chunked_prefill_size=CHUNK) == whole

    def _disaggregated(self, backend: str) -> None:
        disagg = {"disaggregation_transfer_backend": backend}
        asked = [(rid, prompt, NEW) for rid, prompt in PROMPTS.items()]
        with disaggregated(self._path, decode={}, disagg=disagg, **FLAGS) as pair:
            assert run(pair, asked, turns_between=6) == self._right

    def _tokens(self, **flags: Any) -> Tokens:
        with EngineInProcess(self._path, **{**FLAGS, **flags}) as engine:
            return _ask(engine)


WAYS: Mapping[str, Callable[[Served], None]] = {
    "chunks": Served.chunked,
    "prefix cache": Served.cached,
    "retraction": Served.retracted,
    "PD by NIXL": Served.by_nixl,
    "PD by Mooncake": Served.by_mooncake,
    "TP 2": Served.two_ranks,
    "PP 2": Served.two_stages,
    "LoRA": Served.adapted,
    "int8 weights": Served.quantized,
    "fp8 KV": Served.small_cache,
}
# Our kernel alone multiplies integers, and gives rows of bf16 the same bits in any batch, as rounding to 8 bits needs.
NEED_THE_KERNEL = ("int8 weights", "fp8 KV")

Outcomes = dict[str, str]  # by way


def outcomes_of(family: str, folder: Path, ways: Iterable[str] = WAYS) -> Outcomes:
    """Serve a family in those of `ways` that this machine can try."""
    served = Served(family, folder)
    names = [name for name in ways if name not in NEED_THE_KERNEL or linear_kernel() is not None]
    return {name: _outcome(WAYS[name], served) for name in names}


def rows_in(page: str) -> list[tuple[str, Outcomes]]:
    """Architecture and outcomes of each row of the table in `page`."""
    head, _, *rows = [line.strip("|").split("|") for line in page.partition(BEGIN)[2].partition(END)[0].splitlines()]
    return [(row[0].strip("`"), dict(zip(head[1:], row[1:], strict=True))) for row in rows]


def _row_of(family: str, folder: Path) -> str:
    return _line([f"`{ARCHITECTURES[family]}`", *outcomes_of(family, folder).values()])


def _line(cells: Sequence[str]) -> str:
    return f"|{'|'.join(cells)}|\n"


def _outcome(way: Callable[[Served], None], served: Served) -> str:
    try:
        way(served)
    except ConfigError:
        return "refused"
    return "yes"


def _ask(engine: EngineInProcess, *, adapter: int = 0) -> Tokens:
    for rid, prompt in PROMPTS.items():
        engine.add(rid, prompt, max_new_tokens=NEW, adapter=adapter)
    engine.run()
    return dict(engine.tokens)


def main() -> None:
    if linear_kernel() is None:
        sys.exit(f"make model-table: {', '.join(NEED_THE_KERNEL)} need a C compiler")
    head = [_line(["architecture", *WAYS]), _line(["---"] * (1 + len(WAYS)))]
    with TemporaryDirectory() as folder:
        rows = [_row_of(family, Path(folder) / family) for family in tqdm(sorted(ARCHITECTURES), disable=None)]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "".join(head + rows) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
