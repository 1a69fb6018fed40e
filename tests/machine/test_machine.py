"""What the tests need is not only installed here, it loads and starts. The short form of `make fresh-check` runs this file."""

from pathlib import Path

import pytest

from engine.kernels import build
from engine.kernels.build import Kind
from engine.kernels.linear import linear_kernel
from tests.machine.needs import complaint
from tests.router.http.browser import chromium, tab
from transfer_backends.engines.mooncake import import_mooncake
from transfer_backends.engines.nixl import import_nixl

SOURCES = sorted(Path(build.__file__).with_name("csrc").glob("*.c"))


def test_nothing_is_missing():
    assert complaint() == ""


def test_the_transfer_engines_load():
    assert import_nixl() is not None
    assert import_mooncake() is not None


async def test_chromium_starts_and_shows_a_page(tmp_path: Path):
    with chromium(tmp_path) as address:
        async with tab(address) as page:
            assert await page.js("document.title = 'shown'") == "shown"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_each_c_kernel_is_built_and_loads(source: Path):
    assert build.load_library(source) is not None


def test_products_go_by_the_best_kind_that_the_cpu_has():
    kernel, best = linear_kernel(), build.cpu_kinds()[0]
    assert kernel is not None
    assert kernel.kind == best or (best is Kind.AMX and kernel.kind is Kind.AVX512_BF16), "a kernel may refuse AMX"
