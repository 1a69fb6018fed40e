"""A worker whose new role does not start: a real process by itself. (With others, under load: tests/e2e/failover/test_drain.py.)"""

import shutil
import signal
from pathlib import Path

import httpx2 as httpx

from engine.model_files.model_config import DEFAULT_MODEL_PATH
from tests.e2e.cluster import SHIPPED, tandem, wait_until

BOUNDED_S = 60.0


def test_a_role_that_does_not_start_is_left_again_and_sigterm_ends_a_switch(tmp_path: Path) -> None:
    """Only prefill opens the folder of prefixes, so the error shows after the switch. The last weights stay."""
    no_folder, weights = tmp_path / "no-folder", tmp_path / "weights"
    no_folder.touch()
    shutil.copytree(DEFAULT_MODEL_PATH, weights)
    broken = ("--enable-hierarchical-cache", f"--hicache-storage-dir={no_folder}")
    args = ("--disaggregation-mode=decode", "--port=0", "--disaggregation-bootstrap-port=0")
    with tandem(tmp_path / "worker", "serve", *args, *broken, *SHIPPED) as worker:
        with httpx.Client(base_url=worker.url) as http:
            update = {"model_path": str(weights), "weight_version": "7"}
            assert http.post("/update_weights_from_disk", json=update).status_code == 200
            lived = http.get("/health").json()["incarnation"]
            told = http.post("/switch_role", json={"role": "prefill"})
            assert told.status_code == 202 and told.json()["incarnation"] == lived
            again = http.post("/switch_role", json={"role": "prefill"})
            assert again.status_code == 409 and again.json()["error"]["code"] == "switching"

        def is_back() -> bool:
            assert httpx.get(f"{worker.url}/liveness").status_code == 200, "it must not be taken for dead"
            return httpx.get(f"{worker.url}/health").status_code == 200

        wait_until(lambda: not is_back(), within_s=BOUNDED_S, what="it drains")
        wait_until(is_back, within_s=BOUNDED_S, what=worker.log.read_text)
        info = httpx.get(f"{worker.url}/server_info").json()
        assert info["disaggregation_mode"] == "decode" and "the scheduler process ended" in info["last_switch"]["error"]
        assert (info["model_path"], info["weight_version"], info["served_model_name"]) == (str(weights), "7", "recall")
        assert httpx.get(f"{worker.url}/health").json()["incarnation"] != lived
        assert f"--hicache-storage-dir {no_folder}" in worker.log.read_text()

        assert httpx.post(f"{worker.url}/switch_role", json={"role": "prefill"}).status_code == 202
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(BOUNDED_S) == 0
    assert "Traceback" not in worker.log.read_text()
