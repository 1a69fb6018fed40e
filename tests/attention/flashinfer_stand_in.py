"""A stand-in of FlashInfer 0.7.2's wrapper: its signatures, and what it computes, token by token from the paged layout."""

from typing import Any

import torch

VERSION = "0.7.2"


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8
        self.device = float_workspace_buffer.device
        self.planned: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: Any = None,
        window_left: int = -1,
        logits_soft_cap: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: Any = None,
        max_sequence_kv: Any = None,
        fixed_split_size: Any = None,
        disable_split_kv: bool = False,
        uniform_q_len: Any = None,
    ) -> None:
        lists = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens)
        assert all(x.dtype == torch.int32 and x.dim() == 1 for x in lists), [x.dtype for x in lists]
        assert causal and disable_split_kv, "the result of a request would depend on its batch"
        kv_lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        assert torch.equal(kv_lens, seq_lens) and int(paged_kv_last_page_len.min()) >= 1
        assert int(paged_kv_last_page_len.max()) <= page_size and int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        self.planned = dict(locals())

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: Any = None,
        window_left: Any = None,
        sinks: Any = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
        use_fp16_softmax: Any = None,
        uses_spcompress: Any = None,
    ) -> torch.Tensor:
        now, (k, v) = self.planned, paged_kv_cache
        size = now["page_size"]
        assert q.dtype == now["q_data_type"] and k.dtype == v.dtype == now["kv_data_type"]
        assert q.shape == (int(now["qo_indptr"][-1]), now["num_qo_heads"], now["head_dim_qk"]), q.shape
        assert k.shape[1:] == (size, now["num_kv_heads"], now["head_dim_qk"]) and k.stride() == v.stride()
        found = torch.zeros_like(q) if out is None else out
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
