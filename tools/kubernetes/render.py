"""`make manifests`: every overlay as the real kustomize builds it, kept beside the tests.

No registry that we install from has a kustomize, so the tests read these files; a digest of the sources in each one's first
line says whether they are still true. Sample keys stand in for the Secret's, and are not kept.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).parents[2]
SOURCES = REPO / "deploy" / "kubernetes"
MONITORING = REPO / "deploy" / "monitoring"
RULES, OPERATOR_RULES = MONITORING / "alert-rules.yaml", MONITORING / "prometheus-rule.yaml"
RENDERED = REPO / "tests" / "deploy" / "rendered"
KEYS = ("cluster.secret", "api.keys", "admin.keys")


def overlays() -> list[str]:
    return sorted(path.parent.name for path in (SOURCES / "overlays").glob("*/kustomization.yaml"))


def digest_of_sources() -> str:
    """Of all that kustomize reads; the dashboard's contents are another test's business."""
    files = [*SOURCES.rglob("*.yaml"), *MONITORING.glob("*.yaml")]
    text = "\0".join(f"{path.relative_to(REPO)}\0{path.read_text()}" for path in sorted(files))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def first_line() -> str:
    return f"# Built by `make manifests` from deploy/kubernetes, digest {digest_of_sources()}. Do not edit.\n"


def operator_rules() -> str:
    """Return the manifest with the plain rules in it: the Prometheus operator reads no file of rules, and Prometheus no manifest."""
    head = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {"name": "tandem"}}
    groups = textwrap.indent(RULES.read_text()[RULES.read_text().index("groups:") :], "  ")
    return f"# Written by `make manifests` from {RULES.name}. Do not edit.\n{yaml.safe_dump(head)}spec:\n{groups}"


def main() -> int:
    OPERATOR_RULES.write_text(operator_rules())
    command = shlex.split(os.environ.get("KUSTOMIZE", "kubectl kustomize"))
    RENDERED.mkdir(exist_ok=True)
    for old in RENDERED.glob("*.yaml"):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        root = _copy(Path(folder))
        for name in overlays():
            done = subprocess.run(
                [*command, str(root / "overlays" / name)], stdout=subprocess.PIPE, text=True, check=True
            )
            (RENDERED / f"{name}.yaml").write_text(first_line() + done.stdout)
            print(f"{name}: {done.stdout.count(chr(10))} lines")
            for warning in warnings_of(list(yaml.safe_load_all(done.stdout))):
                print(f"{name}: WARNING: {warning}")
    return 0


def warnings_of(documents: Sequence[Any]) -> list[str]:
    """Return what a valid overlay does badly: pods with GPUs, and no way for KV between them but TCP through the host."""
    specs = [spec for spec in _pod_specs(documents) if _asks_for(spec, "nvidia.com/gpu")]
    apart = [
        spec for spec in specs if not (_asks_for(spec, "rdma/") or spec.get("hostPID") or len(spec["containers"]) > 1)
    ]
    if not apart:
        return []
    return [
        f"{len(apart)} kinds of pods have GPUs but no RDMA device: UCX refuses cuda_ipc between their PID namespaces, so KV goes "
        "by TCP; add components/rdma, or share the namespace (hostPID, or one pod with shareProcessNamespace)"
    ]


def _asks_for(spec: Mapping[str, Any], resource: str) -> bool:
    limits = [container.get("resources", {}).get("limits", {}) for container in spec["containers"]]
    return any(name.startswith(resource) for names in limits for name in names)


def _pod_specs(found: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(found, Mapping):
        if "containers" in found:
            yield found
        found = list(found.values())
    if isinstance(found, Sequence) and not isinstance(found, str):
        for part in found:
            yield from _pod_specs(part)


def _copy(folder: Path) -> Path:
    """The tree as a user has it after make_secrets.sh, with sample keys and an empty dashboard."""
    shutil.copytree(SOURCES, folder / "kubernetes", ignore=shutil.ignore_patterns("secrets"))
    shutil.copytree(MONITORING, folder / "monitoring")
    (folder / "monitoring" / "grafana-dashboard.json").write_text("{}\n")
    secrets = folder / "kubernetes" / "base" / "secrets"
    secrets.mkdir()
    for name in KEYS:
        (secrets / name).write_text("a sample, no secret\n")
    return folder / "kubernetes"


if __name__ == "__main__":
    sys.exit(main())
