"""A sender and a receiver that succeed without a peer: SGLang's `bootstrap_host 2.2.2.2`, for warm-up and health checks."""

from collections.abc import Sequence

from transfer_backends.contract import Gate, Work
from transfer_backends.kvpoll import FINAL, IllegalTransition, KVPoll


class _Fake:
    def __init__(self) -> None:
        self._state = KVPoll.WaitingForInput
        self._reason: str | None = None

    def poll(self) -> KVPoll:
        return self._state

    def abort(self, reason: str) -> None:
        if self._state not in FINAL:
            self._state, self._reason = KVPoll.Failed, reason

    def failure(self) -> str | None:
        return self._reason

    def close(self) -> None:
        if self._state not in FINAL:
            raise RuntimeError(f"fake room closed in {self._state.name}")


class FakeSender(_Fake):
    @property
    def num_pages(self) -> int | None:
        return None

    @property
    def skip_pages(self) -> int:
        return 0

    def send(
        self,
        src_pages: Sequence[int],
        *,
        start: int,
        last: bool,
        metadata_row: int | None = None,
        gate: Gate | None = None,
    ) -> None:
        if self._state is KVPoll.Success:
            raise IllegalTransition("fake room: send after the last chunk")
        if self._state is not KVPoll.Failed:
            self._state = KVPoll.Success if last else KVPoll.Transferring

    def released(self) -> bool:
        return self._state in FINAL


class FakeReceiver(_Fake):
    def provide(self, dst_pages: Sequence[int], metadata_row: int, *, skip_pages: int = 0) -> None:
        if self._state is KVPoll.Success:
            raise IllegalTransition("fake room: provided twice")
        if self._state is not KVPoll.Failed:
            self._state = KVPoll.Success

    def recompute(self, dst_pages: Sequence[int], metadata_row: int, work: Work) -> None:
        raise IllegalTransition("fake room: no prefill worker is there to compute")

    def retries(self) -> int:
        return 0

    def drained(self) -> bool:
        return self._state in FINAL
