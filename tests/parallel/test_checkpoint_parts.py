"""A rank's part of a tensor is the same rows and columns of the whole, in every kind of file; and no more of the file is read."""

from pathlib import Path

import pytest
import torch

from engine.models.checkpoint import Checkpoint
from engine.parallel.layout import Cut, Extent
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.models.tiny_gguf import make_tiny_gguf

Q, K = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.norm.weight"
HIDDEN, HEADS, KV_HEADS, DIM, SIZE = 256, 4, 2, 64, 512
WHOLE = {Q: [HEADS * DIM, HIDDEN], K: [KV_HEADS * DIM, HIDDEN], DOWN: [HIDDEN, SIZE], NORM: [HIDDEN]}


@pytest.fixture(scope="module", params=["safetensors", "F32", "Q8_0", "Q4_K"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "safetensors":
        sizes = {"hidden_size": HIDDEN, "intermediate_size": SIZE, "head_dim": DIM, "num_hidden_layers": 2}
        return make_tiny_checkpoint(folder, "llama", shards=2, **sizes)
    made, _ = make_tiny_gguf(
        folder, "llama", request.param, hidden_size=HIDDEN, intermediate_size=SIZE, head_dim=DIM, num_hidden_layers=2
    )
    return str(made)


def test_parts_are_rows_and_columns_of_the_whole(file: str) -> None:
    with Checkpoint(file, dtype="float32", device="cpu", progress=False) as checkpoint:
        whole = {name: checkpoint.take(name, shape) for name, shape in WHOLE.items()}

        def part(name: str, *shape: Extent) -> torch.Tensor:
            taken = checkpoint.take(name, shape)
            assert taken.is_contiguous()
            return taken

        q = Cut(HEADS, range(1, 3)).times(DIM)
        assert torch.equal(part(Q, q, HIDDEN), whole[Q][64:192])
        for columns in (range(256, 512), range(100, 300), range(511, 512)):  # inside, across and at the end of blocks
            expected = whole[DOWN][:, columns.start : columns.stop]
            assert torch.equal(part(DOWN, HIDDEN, Cut(SIZE, columns)), expected), columns
        assert torch.equal(part(DOWN, Cut(HIDDEN, range(9, 17)), Cut(SIZE, range(3, 5))), whole[DOWN][9:17, 3:5])
        assert torch.equal(part(NORM, Cut(HIDDEN, range(5, 7))), whole[NORM][5:7])
        stacked = checkpoint.take_rows([Q, K], [q, Cut(KV_HEADS, range(1, 2)).times(DIM)], [HIDDEN])
        assert torch.equal(stacked, torch.cat((whole[Q][64:192], whole[K][64:])))


def test_a_part_is_read_without_the_rest_of_its_file(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama", hidden_size=512, intermediate_size=8192, num_hidden_layers=1)
    with Checkpoint(path, dtype="float32", device="cpu", progress=False) as checkpoint:
        before = resident_file_bytes()
        checkpoint.take("model.layers.0.mlp.gate_proj.weight", [Cut(8192, range(1024)), 512])
        assert resident_file_bytes() - before < 2 * 1024 * 512 * 4, "the tensor is eight times what was taken"


def resident_file_bytes() -> int:
    """Bytes of mapped files in this process' memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:"))
