"""Tiny models that remember more than pages of all tokens, with heads for four ranks: family, and fields of its configuration."""

from typing import Any

Made = tuple[str, dict[str, Any]]

_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
DELTA_RULE: Made = ("qwen3_5_text", _HEADS)
DELTA_RULE_INTERLEAVED: Made = ("qwen3_next", _HEADS)  # weights by key head
MAMBA2: Made = ("granitemoehybrid", {})
MAMBA2_SHARED: Made = ("falcon_h1", {"mamba_n_groups": 1, "mamba_rms_norm": False})  # ranks share the group
SOME_WINDOWS: Made = ("qwen2", {"sliding_window": 22, "use_sliding_window": True, "max_window_layers": 2})
ALL_WINDOWS: Made = ("mistral", {"sliding_window": 22})
