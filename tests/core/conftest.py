import pytest

from engine.core import new_token_ratio


@pytest.fixture
def hopeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is expected to grow, so memory runs out."""
    monkeypatch.setattr(new_token_ratio, "CLIP_TOKENS", 0)
