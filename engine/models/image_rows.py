"""Where a step's tokens stand for parts of images, and what stands in for their embeddings."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImageRows:
    """`rows` [n] int64, each once: of the step's tokens. `features` [n, feature size]: of them, as a `VisionTower` gives them."""

    rows: Tensor
    features: Tensor

    def embedded(self, hidden: Tensor) -> Tensor:
        """`hidden` [T, size], whose `rows` become the embeddings in `features`, in place."""
        return hidden.index_copy_(0, self.rows, self._part(0, hidden))

    def deepened(self, delta: Tensor, level: int) -> Tensor:
        """`delta` [T, size] with level `level` (0, 1, ...) of the features added to its `rows`: a new tensor."""
        return delta.index_add(0, self.rows, self._part(1 + level, delta))

    def _part(self, number: int, like: Tensor) -> Tensor:
        size = like.shape[1]
        return self.features[:, number * size : (number + 1) * size].to(like.dtype)
