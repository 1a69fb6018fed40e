"""README's three commands, as they stand but for their ports: a cluster that answers the line to paste."""

import json
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from deploy.launcher.probe import free_ports
from tests.e2e.cluster import end_tree, wait_until
from tests.e2e.ranks.leaders import ANEW, start_process
from tools.fresh import readme

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TANDEM = ".venv/bin/tandem"
PORTS = ("30000", "30001", "8000")


@pytest.mark.slow  # `make test` parses them: tests/docs/test_pages.py
def test_three_commands_are_a_cluster(tmp_path: Path) -> None:
    ports = dict(zip(PORTS, map(str, free_ports(3)), strict=True))
    with ExitStack() as stack:
        for i, line in enumerate(readme.by_hand(README)):
            command = [sys.executable, "-m", "deploy", *shlex.split(with_ports(line, ports).removeprefix(TANDEM))]
            if "prefill" in line and "serve" in line:
                command += ["--disaggregation-bootstrap-port", str(free_ports(1)[0])]
            process = start_process(command, tmp_path / f"{i}.log", ANEW)
            stack.callback(end_tree, process)
        paste = tmp_path / "paste"
        line = with_ports(readme.find("pasted", README), ports).replace("curl -s", "curl -s -f")

        def answered() -> bool:
            asked = start_process(["bash", "-c", f"({line}) > {paste}"], tmp_path / "curl.log")
            return asked.wait(60) == 0

        wait_until(answered, within_s=90, what=lambda: "\n".join(log.read_text() for log in tmp_path.glob("*.log")))
        content = json.loads(paste.read_text())["choices"][0]["message"]["content"]
        assert content.strip() == readme.find("answer", README)


def with_ports(text: str, ports: dict[str, str]) -> str:
    for shown, free in ports.items():
        text = text.replace(f":{shown}", f":{free}").replace(f"--port {shown}", f"--port {free}")
    return text
