"""A stand-in of FlashInfer 0.7.2's wrapper: its signatures, and what it computes, token by token from the paged layout."""

from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Any

import torch

VERSION = "0.7.2"


def _signature(required: str, optional: str) -> Signature:
    """Of a method with these parameters; behind `*args` only by keyword."""
    kind = Parameter.KEYWORD_ONLY if "*" in required else Parameter.POSITIONAL_OR_KEYWORD
    first = [
        Parameter(name.strip("*"), Parameter.VAR_POSITIONAL if "*" in name else Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("self", *required.split())
    ]
    return Signature([*first, *(Parameter(name, kind, default=None) for name in optional.split())])


SIGNATURES = {
    "__init__": _signature(
        "float_workspace_buffer",
        """kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf paged_kv_last_page_len_buf
        custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs variant_owns_mask""",
    ),
    "plan": _signature(
        """qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk
        page_size""",
        """head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction sm_scale window_left
        logits_soft_cap rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking prefix_len_ptr
        token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr seq_lens seq_lens_q block_tables
        max_token_per_sequence max_sequence_kv fixed_split_size disable_split_kv uniform_q_len""",
    ),
    "run": _signature(
        "q paged_kv_cache *args",
        """q_scale k_scale v_scale out lse return_lse lse_base lse_layout enable_pdl window_left sinks kv_cache_sf
        skip_softmax_threshold_scale_factor use_fp16_softmax uses_spcompress""",
    ),
}


def _given(method: str, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
    """Arguments by name, None where left out. Raises TypeError, as a call would."""
    found = SIGNATURES[method].bind(*args, **kwargs)
    found.apply_defaults()
    return found.arguments


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _given("__init__", self, *args, **kwargs)
        workspace = given["float_workspace_buffer"]
        assert given["kv_layout"] == "NHD" and workspace.dtype == torch.uint8
        self.device = workspace.device
        self.planned: Mapping[str, Any] = {}

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = _given("plan", self, *args, **kwargs)
        lengths = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "seq_lens")
        lists = [given[name] for name in lengths]
        assert all(x.dtype == torch.int32 and x.dim() == 1 for x in lists), [x.dtype for x in lists]
        assert given["causal"] and given["disable_split_kv"], "the result of a request would depend on its batch"
        _, kv_indptr, indices, last_page_lens, seq_lens = lists
        kv_lens = (kv_indptr.diff() - 1) * given["page_size"] + last_page_lens
        assert torch.equal(kv_lens, seq_lens) and int(last_page_lens.min()) >= 1
        assert int(last_page_lens.max()) <= given["page_size"] and int(kv_indptr[-1]) == len(indices)
        self.planned = given

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = _given("run", self, *args, **kwargs)
        q, (k, v), now = given["q"], given["paged_kv_cache"], self.planned
        size = now["page_size"]
        assert q.dtype == now["q_data_type"] and k.dtype == v.dtype == now["kv_data_type"]
        assert q.shape == (int(now["qo_indptr"][-1]), now["num_qo_heads"], now["head_dim_qk"]), q.shape
        assert k.shape[1:] == (size, now["num_kv_heads"], now["head_dim_qk"]) and k.stride() == v.stride()
        found = torch.zeros_like(q) if given["out"] is None else given["out"]
        for i in range(len(now["qo_indptr"]) - 1):
            rows = slice(*now["qo_indptr"][i : i + 2].tolist())
            pages = now["paged_kv_indices"][slice(*now["paged_kv_indptr"][i : i + 2].tolist())]
            at = torch.arange(int(now["seq_lens"][i]))
            keys, values = (x[pages[at // size].long(), at % size] for x in (k, v))
            found[rows] = self._attend(q[rows], keys, values, scale=now["sm_scale"])
        return found

    @staticmethod
    def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
        last = torch.arange(len(k) - len(q), len(k))[:, None]
        scores.masked_fill_(torch.arange(len(k))[None, :] > last, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))
