"""Accesses of the kernels on a GPU, none of them out of bounds. Times nothing."""

import os
import shutil
import subprocess
import sys
from typing import Any

import torch

from benchmarks.cluster import ROOT
from benchmarks.gpu.numerics import Case, worst_error
from benchmarks.gpu.rates import KINDS
from benchmarks.gpu.target import Target
from engine.core.plan import SlotOpen
from engine.sampler.sampler import make_sampler
from engine.sampling_params import SamplingParams

CUDA_BIN = "/usr/local/cuda/bin"
FOUND = 9  # the exit status for a wrong access
CASES = (Case(8, 2, 64), Case(8, 2, 64, window=40, sinks=True, trees=True), Case(16, 1, 576, rank=512))
SMALL = (Case(8, 2, 16, dtype="float32"),)
VOCAB = 1031  # odd: the last tile is not full


def sanitizer(target: Target) -> dict[str, Any]:
    """Run attention's kernels and the sampler under NVIDIA's memcheck, which is some hundred times slower; raises if it finds something."""
    if target.small:
        use_kernels(target)
        return {"errors": None, "checked": False}
    tool = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:{CUDA_BIN}")
    if tool is None:
        raise FileNotFoundError("compute-sanitizer: not on PATH; it comes with the CUDA toolkit")
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND), sys.executable, "-m", __spec__.name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"memcheck ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-500:]}")
    return {"errors": 0, "checked": True}


def use_kernels(target: Target) -> None:
    """Extend, decode, of latents and in windows, too, and a sample of each kind."""
    for case in target.pick(CASES, SMALL):
        worst_error(target, case, lengths=target.pick([1, 19, 130], [1, 19]))
    sampler = make_sampler(num_slots=len(KINDS), vocab_size=VOCAB, device=torch.device(target.device))
    for slot, flags in enumerate(KINDS.values()):
        sampling = SamplingParams(max_new_tokens=8, ignore_eos=True, seed=slot, **flags)
        sampler.open(SlotOpen(slot=slot, sampling=sampling, prompt_ids=[1], output_ids=[], eos_ids=()))
    logits = torch.randn(len(KINDS), VOCAB, device=target.device)
    for step in range(2):
        sampler.sample(logits, list(range(len(KINDS))), [step] * len(KINDS))
    target.sync()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    use_kernels(Target(small=False, limits={}))
