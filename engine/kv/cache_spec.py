"""What a layer keeps between steps; the KV pool decides where the bytes are."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """K and V of every token. Per token: 2 * num_kv_heads * head_dim elements of `dtype` ("bfloat16" | "float32")."""

    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def itemsize_bytes(self) -> int:
        return {"bfloat16": 2, "float16": 2, "float32": 4}[self.dtype]

    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize_bytes
