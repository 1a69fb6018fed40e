"""Data sheets of GPUs, dense, without sparsity; plans multiply them by an efficiency.

NVIDIA A100 (80 GB SXM), L4, L40S, H100 (SXM5), H200 (SXM), HGX B200 (an eighth of the board; half
of "sparse"); AMD Instinct MI300X. `link_gb_s` assumes a 400 Gb/s port per GPU (A100: 200, L4 and
L40S: 100). `peer_gb_s`: one direction of NVLink (half of the data sheet), Infinity Fabric to seven
others, or PCIe 4 x16 (L4, L40S).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU's data sheet. `tflops`: dense bf16. `link_gb_s`: to other machines. `peer_gb_s`: within
    one. 1 GB = 10^9 bytes.
    """

    name: str
    tflops: float
    memory_gb: float
    memory_gb_s: float
    link_gb_s: float
    peer_gb_s: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="A100", tflops=312, memory_gb=80, memory_gb_s=2039, link_gb_s=25, peer_gb_s=300),
        Gpu(name="L4", tflops=121, memory_gb=24, memory_gb_s=300, link_gb_s=12.5, peer_gb_s=32),
        Gpu(name="L40S", tflops=362, memory_gb=48, memory_gb_s=864, link_gb_s=12.5, peer_gb_s=32),
        Gpu(name="H100", tflops=989, memory_gb=80, memory_gb_s=3350, link_gb_s=50, peer_gb_s=450),
        Gpu(name="H200", tflops=989, memory_gb=141, memory_gb_s=4800, link_gb_s=50, peer_gb_s=450),
        Gpu(name="B200", tflops=2250, memory_gb=180, memory_gb_s=8000, link_gb_s=50, peer_gb_s=900),
        Gpu(name="MI300X", tflops=1307, memory_gb=192, memory_gb_s=5300, link_gb_s=50, peer_gb_s=448),
    )
}
