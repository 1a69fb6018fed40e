"""One browser for all tests of pages."""

from collections.abc import Iterator

import pytest

from tests.router.http.browser import chromium


@pytest.fixture(scope="package")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where its DevTools listen."""
    with chromium(tmp_path_factory.mktemp("chromium")) as address:
        yield address
