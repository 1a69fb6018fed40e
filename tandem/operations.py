"""Operations of a running engine: pauses, memory, weights, adapters."""

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from engine.frontend.apis.admin.control import flush
from engine.frontend.apis.admin.weights import GROUP
from engine.frontend.services import Services
from tandem.errors import FOREIGN
from tandem.requests import WeightSource, ordered, updated

R = TypeVar("R")


class EngineOperations(Generic[R]):
    """Orders to an engine. `LLM` waits until all processes have obeyed, `AsyncLLM` is awaited.

    They raise RequestError, which names the argument, and change nothing then.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            hint = f"; use {FOREIGN[name]}" if name in FOREIGN else ""
            raise AttributeError(f"{type(self).__name__} has no {name}{hint}", name=name, obj=self)

    def _obey(self, order: Callable[[Services], Coroutine[Any, Any, object]]) -> R:
        raise NotImplementedError

    def pause(self, mode: str | None = None) -> R:
        """Stop all steps. `mode`: "abort" (default), "retract", "in_place" or "block"."""
        return self._order("/pause_generation", mode=mode)

    def resume(self) -> R:
        """Continue after `pause`."""
        return self._order("/continue_generation")

    def flush_cache(self) -> R:
        """Drop all cached prefixes, while nothing runs."""
        return self._obey(flush)

    def release_memory(self, tags: Sequence[str] | None = None) -> R:
        """Free the memory of `tags` ("kv_cache", "weights"), by default all, while nothing runs."""
        return self._order("/release_memory_occupation", tags=tags)

    def resume_memory(self, tags: Sequence[str] | None = None) -> R:
        """Take memory again after `release_memory`; weights come from the checkpoint."""
        return self._order("/resume_memory_occupation", tags=tags)

    def update_weights(
        self, source: WeightSource, *, weight_version: str | None = None, abort_all_requests: bool | None = None
    ) -> R:
        """Take the weights of another checkpoint of the same shape, or tensors.

        Tensors are pairs of the checkpoint's name and a whole torch tensor; the others stay.
        """
        return self._obey(
            lambda s: updated(s, source, weight_version=weight_version, abort_all_requests=abort_all_requests)
        )

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = GROUP,
        backend: str = "nccl",
    ) -> R:
        """Join the process group that rank 0 opens, with ranks from `rank_offset`."""
        return self._order(
            "/init_weights_update_group",
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        group_name: str = GROUP,
        **more: Any,
    ) -> R:
        """Take the tensors that rank 0 of a group broadcasts in this order.

        `dtypes`: torch's, or names as "bfloat16". `more`: as in `update_weights`.
        """
        tensors = {"names": names, "dtypes": [str(dtype) for dtype in dtypes], "shapes": shapes}
        return self._order("/update_weights_from_distributed", **tensors, group_name=group_name, **more)

    def destroy_weights_update_group(self, group_name: str = GROUP) -> R:
        return self._order("/destroy_weights_update_group", group_name=group_name)

    def load_lora_adapter(self, lora_name: str, lora_path: str | Path) -> R:
        """Load an adapter, which requests name by `lora_path`. Needs `enable_lora=True`."""
        return self._order("/load_lora_adapter", lora_name=lora_name, lora_path=str(lora_path))

    def unload_lora_adapter(self, lora_name: str) -> R:
        """Unload an adapter once its requests have ended."""
        return self._order("/unload_lora_adapter", lora_name=lora_name)

    def _order(self, path: str, **fields: Any) -> R:
        return self._obey(lambda s: ordered(s, path, fields))
