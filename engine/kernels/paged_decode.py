"""Python side of paged_decode.c (being built: until then every call falls back to torch)."""

import torch


class PagedDecode:
    def takes(self, head_dim: int, dtype: str) -> bool:
        return False

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        raise NotImplementedError


def load_paged_decode() -> PagedDecode | None:
    return None
