"""Train an EAGLE layer for SmolLM2 on the files of this repository, so that benchmarks have a real drafter: some minutes on a CPU.

usage: python -m benchmarks.train_eagle DIR [--tokens 120000] [--epochs 3] [--threads 2]

The layer learns what the model would say next (its logits, over the FREQUENT tokens of the texts alone) and the hidden state that it says it
with, from hidden states with some noise: so a second pass, which begins from the layer's own, goes on. Li et al., arXiv:2401.15077.
Files that benchmarks/tree_speed.py asks about are left out.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from benchmarks.cluster import ROOT
from benchmarks.draft_trees import Attention
from benchmarks.speculation import FILES
from engine.model_files.model_config import ModelConfig, load_model_config
from engine.model_files.source import smollm2_file
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.text.tokenizer import load_tokenizer

LENGTH, BATCH = 256, 8
FREQUENT = 8192
NOISE, RATE, OF_STATE = 0.1, 1e-3, 0.3
SEED = 5


class Eagle(nn.Module):
    """As engine/models/eagle.py computes it, in float32 and with gradients."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, wide, dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.heads, self.kv_heads, self.dim, self.eps = config.num_heads, config.num_kv_heads, dim, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.q, self.k, self.v = (
            nn.Linear(hidden, n * dim, bias=False) for n in (self.heads, self.kv_heads, self.kv_heads)
        )
        self.o = nn.Linear(self.heads * dim, hidden, bias=False)
        self.norm = nn.Parameter(torch.ones(hidden))
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((hidden, wide), (hidden, wide), (wide, hidden))
        )
        angles = torch.arange(LENGTH)[:, None] * config.rope.theta ** -(torch.arange(0, dim, 2) / dim)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, embedded: Tensor, before: Tensor) -> Tensor:
        """[B, T, hidden] for the embeddings of T tokens and the hidden states before them."""
        x = self.fc(torch.cat((embedded, before), -1))
        q, k, v = (part(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = self._turned(q), self._turned(k)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        y = functional.rms_norm(x, x.shape[-1:], self.norm, self.eps)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def _turned(self, x: Tensor) -> Tensor:
        half = self.dim // 2
        other = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * self.cos[: x.shape[2]] + other * self.sin[: x.shape[2]]

    def tensors(self) -> dict[str, Tensor]:
        layer = {
            "self_attn.q_proj": self.q,
            "self_attn.k_proj": self.k,
            "self_attn.v_proj": self.v,
            "self_attn.o_proj": self.o,
            "mlp.gate_proj": self.gate,
            "mlp.up_proj": self.up,
            "mlp.down_proj": self.down,
        }
        found = {f"layers.0.{name}.weight": one.weight for name, one in layer.items()}
        found |= {"fc.weight": self.fc.weight, "layers.0.post_attention_layernorm.weight": self.norm}
        return {name: tensor.detach().bfloat16().contiguous() for name, tensor in found.items()}


def texts() -> list[str]:
    left_out = {ROOT / name for name in FILES}
    files = [path for suffix in ("py", "md") for path in sorted(ROOT.glob(f"*/**/*.{suffix}")) if path not in left_out]
    random.Random(SEED).shuffle(files)
    return [path.read_text() for path in files if ".venv" not in path.parts]


def chunks(limit: int) -> list[list[int]]:
    tokenizer, found = load_tokenizer(str(smollm2_file())), list[list[int]]()
    for text in texts():
        ids = tokenizer.encode(text)
        found += [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH, LENGTH)][:4]
        if len(found) * LENGTH >= limit:
            break
    return found


@torch.inference_mode()
def states(model: DenseDecoder, ids: Sequence[int]) -> Tensor:
    """[T, hidden] float32: of which the model's head makes logits."""
    hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)), Attention())
    return hidden.float()


def train(config: ModelConfig, model: DenseDecoder, found: list[list[int]], *, epochs: int) -> Eagle:
    torch.manual_seed(SEED)
    table = model.embedded(torch.arange(config.vocab_size)).float().clone()
    hidden = [states(model, ids).clone() for ids in tqdm(found, desc="states", disable=None)]
    counts = Counter(token for ids in found for token in ids)
    frequent = torch.tensor(sorted(token for token, _ in counts.most_common(FREQUENT)))
    head = table[frequent]
    eagle = Eagle(config)
    steps = epochs * (len(found) // BATCH)
    optimizer = torch.optim.AdamW(eagle.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=steps, pct_start=0.1)
    bar, right = tqdm(range(steps), desc="steps", disable=None), 0.0
    order: list[int] = []
    for _ in bar:
        if len(order) < BATCH:
            order = torch.randperm(len(found)).tolist()
        batch, order = order[:BATCH], order[BATCH:]
        ids, true = torch.tensor([found[i] for i in batch]), torch.stack([hidden[i] for i in batch])
        before = torch.cat((torch.zeros_like(true[:, :1]), true[:, :-1]), 1)
        before = before + (torch.rand_like(before) - 0.5) * NOISE * before.abs().mean() * 4
        out = eagle(table[ids], before)
        wanted = (true @ head.T).flatten(0, 1)
        said = (out @ head.T).flatten(0, 1)
        loss = functional.cross_entropy(said, wanted.softmax(-1)) + OF_STATE * functional.smooth_l1_loss(out, true)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(eagle.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        right = 0.9 * right + 0.1 * float((said.argmax(-1) == wanted.argmax(-1)).float().mean())
        bar.set_postfix_str(f"right {right:.2f}, loss {float(loss):.2f}", refresh=False)
    return eagle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = str(smollm2_file())
    config = load_model_config(path)
    model = load_model(path, config, dtype="bfloat16", device="cpu", progress=False, context_length=2048)
    eagle = train(config, model, chunks(args.tokens), epochs=args.epochs)
    args.folder.mkdir(parents=True, exist_ok=True)
    save_file(eagle.tensors(), args.folder / "model.safetensors", metadata={"format": "pt"})
    (args.folder / "config.json").write_text(json.dumps(fields_of(config), indent=1))


def fields_of(config: ModelConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


if __name__ == "__main__":
    main()
