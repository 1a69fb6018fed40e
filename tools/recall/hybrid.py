"""The weights of `recall-hybrid`: `recall-wide` as a Qwen3.5 whose first layer has a state, with an MTP layer that is right.

Layer 0 is Gated DeltaNet: its convolution brings the word before, whose name it adds to `before`. So a token is right only if the state
is that of the tokens before it. The other layers are those of `recall-wide`, all gates open; norms add 1 to their weights.

The MTP layer looks up as the drafters of `recall-wide` do (tests/models/recall_drafters.py): a lost hidden state is a wrong draft.
"""

from typing import Any

import torch
from torch.nn.functional import silu

from tools.recall.parts import BEFORE_GAIN, CONTENT_HARDNESS, HEAD_DIM, content_dims, in_bfloat16, layer, zeros
from tools.recall.wide import (
    ANSWER,
    BEFORE,
    BLOCK_DIMS,
    CODE_DIMS,
    GROUP,
    HIDDEN,
    NAME,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    ONE,
    QUERY,
    SHAPE,
    STOP_SIZE,
    answering,
    around,
    block_codes,
    look_ups,
    normed,
)

GATE = 16.0  # of `one` behind a norm, which is about 2: a sigmoid of that is 1
KEY_DIM, VALUE_DIM, TAPS = 4, 2 * BLOCK_DIMS, 4  # a head's values: its block of the name, and the same negative
FIELDS: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention"] + ["full_attention"] * (NUM_LAYERS - 1),
    "linear_num_key_heads": NUM_KV_HEADS,
    "linear_num_value_heads": NUM_KV_HEADS,
    "linear_key_head_dim": KEY_DIM,
    "linear_value_head_dim": VALUE_DIM,
    "linear_conv_kernel_dim": TAPS,
    "partial_rotary_factor": 1.0,
    "mtp_num_hidden_layers": 1,
}


def build_weights() -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by its Hugging Face name, contiguous, bfloat16."""
    codes = block_codes()
    embedding = SHAPE.embeddings(codes, stop_size=STOP_SIZE)
    first = layer(0, {}, hidden=HIDDEN, hardness=CONTENT_HARDNESS)
    first = {name: tensor for name, tensor in first.items() if "self_attn" not in name}
    layers = first | answering(look_ups(codes, embedding, start_follows_itself=False))
    own = _as_hybrid(around(codes, embedding) | layers | _mtp())
    return in_bfloat16(own | _look_back(float(normed(embedding[-1])[NAME].abs().max())))


def _as_hybrid(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Norms that add 1 to their weights; behind each head of q its gate, which is open."""
    own = {name: tensor - 1.0 if "norm" in name else tensor for name, tensor in weights.items()}
    gates = zeros(NUM_HEADS, HEAD_DIM, HIDDEN)
    gates[:, :, ONE] = GATE
    for name in own:
        if name.endswith(".q_proj.weight"):
            heads = own[name].view(NUM_HEADS, HEAD_DIM, HIDDEN)
            own[name] = torch.cat((heads, gates), 1).view(2 * NUM_HEADS * HEAD_DIM, HIDDEN)
    return own


def _look_back(name_size: float) -> dict[str, torch.Tensor]:
    """Layer 0: each head's values are its block of the name one token back, which its state then holds. `name_size`: of its input.

    silu (x) - silu (-x) is x.
    """
    keys, values = NUM_KV_HEADS * KEY_DIM, NUM_KV_HEADS * VALUE_DIM
    qkv, z, ones = zeros(2 * keys + values, HIDDEN), zeros(values, HIDDEN), zeros(NUM_KV_HEADS, HIDDEN)
    conv, out = zeros(2 * keys + values, 1, TAPS), zeros(HIDDEN, values)
    own = torch.eye(BLOCK_DIMS, dtype=torch.float64)
    qkv[: 2 * keys : KEY_DIM, ONE] = 1.0  # the same key for every token
    conv[: 2 * keys, 0, -1] = 1.0
    conv[2 * keys :, 0, -2] = 1.0
    z[:, ONE] = ones[:, ONE] = GATE
    size = _gated_size(name_size)
    for head in range(NUM_KV_HEADS):
        first = head * VALUE_DIM
        both = torch.cat((own, -own))
        qkv[2 * keys + first : 2 * keys + first + VALUE_DIM, SHAPE.block(NAME, head)] = both
        out[SHAPE.block(BEFORE, head), first : first + VALUE_DIM] = BEFORE_GAIN * name_size / size * both.T
    prefix = "model.layers.0.linear_attn."
    return {
        f"{prefix}in_proj_qkv.weight": qkv,
        f"{prefix}in_proj_z.weight": z,
        f"{prefix}in_proj_b.weight": ones,  # a token replaces what is under its key
        f"{prefix}in_proj_a.weight": zeros(NUM_KV_HEADS, HIDDEN),
        f"{prefix}conv1d.weight": conv,
        f"{prefix}A_log": zeros(NUM_KV_HEADS),
        f"{prefix}dt_bias": zeros(NUM_KV_HEADS),
        f"{prefix}norm.weight": torch.ones(VALUE_DIM),
        f"{prefix}out_proj.weight": out,
    }


def _gated_size(name_size: float) -> float:
    """Of a number of the name behind the norm and the gate of layer 0, the negative one taken off."""
    plus, minus = (float(silu(torch.tensor(sign * name_size, dtype=torch.float64))) for sign in (1, -1))
    one = name_size  # `one` is as large as a number of the name
    return (plus - minus) / ((plus**2 + minus**2) / 2) ** 0.5 * GATE * one


def _mtp() -> dict[str, torch.Tensor]:
    """fc reads [embedding | hidden state]."""
    own, fc = torch.eye(CODE_DIMS, dtype=torch.float64), zeros(HIDDEN, 2 * HIDDEN)
    fc[NAME, NAME] = own
    fc[ONE, ONE] = 1.0
    fc[BEFORE, HIDDEN + NAME.start : HIDDEN + NAME.stop] = own
    fc[QUERY, HIDDEN + ANSWER.start : HIDDEN + ANSWER.stop] = own
    attention, content = SHAPE.projections(), content_dims(CODE_DIMS)
    for kv_head in range(NUM_KV_HEADS):
        first = kv_head * HEAD_DIM
        attention["k"][[first + dim for dim in content], BEFORE] = own
        attention["v"][first : first + CODE_DIMS, NAME] = own
        for head in SHAPE.query_heads(kv_head):
            attention["q"][[head + dim for dim in content], QUERY] = own
            attention["o"][ANSWER, head : head + CODE_DIMS] = own / (GROUP * NUM_KV_HEADS)
    plain = layer(0, attention, hidden=HIDDEN, hardness=CONTENT_HARDNESS)
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return {
        **{name.replace("model.", "mtp.", 1): tensor for name, tensor in plain.items()},
        **{f"mtp.{name}.weight": torch.ones(HIDDEN) for name in norms},
        "mtp.fc.weight": fc,
    }
