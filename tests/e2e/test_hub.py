"""A worker that serves a model of the hub (a stand-in of it): one download, served under the model's own name."""

from pathlib import Path

import httpx2 as httpx
import pytest

from tests.e2e.cluster import cluster
from tests.models.files.hub_stand_in import hub_stand_in
from tests.models.tiny_checkpoints import make_tiny_checkpoint

MODEL = "acme/tiny-qwen"


def test_tandem_up_downloads_once_and_serves_the_model_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_checkpoint(tmp_path / "hub" / MODEL / "main", "qwen3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with hub_stand_in(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with cluster(tmp_path / "run", "--unified", "--model-path", MODEL, "--max-total-tokens", "4096") as c:
            asked = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            answers = [
                httpx.post(f"{c.router}/v1/completions", json={"model": model, **asked}, timeout=60).json()
                for model in (MODEL, "default")
            ]
            assert [card["id"] for card in httpx.get(f"{c.router}/v1/models").json()["data"]] == [MODEL]
        assert set(hub.downloads.values()) == {1}
    assert [answer["model"] for answer in answers] == [MODEL, MODEL]
    assert answers[0]["choices"] == answers[1]["choices"]
