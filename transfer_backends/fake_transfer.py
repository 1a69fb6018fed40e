"""Transfer that succeeds without a peer (SGLang's `bootstrap_host 2.2.2.2`), for health checks."""

from transfer_backends.contract import SourcePages, TargetPages
from transfer_backends.sides import FINAL, IllegalTransition, KVPoll


class FakeTransfer:
    """`KVSender` and `KVReceiver` in one."""

    num_pages: int | None = None
    skip_pages = 0

    def __init__(self) -> None:
        self._state = KVPoll.WaitingForInput
        self._reason: str | None = None

    def poll(self) -> KVPoll:
        return self._state

    def send(self, source: SourcePages) -> None:
        self._advance(KVPoll.Transferring if source.metadata_row is None else KVPoll.Success)

    def provide(self, target: TargetPages) -> None:
        self._advance(KVPoll.Success)

    def _advance(self, to: KVPoll) -> None:
        if self._state is KVPoll.Success:
            raise IllegalTransition("fake room: it has ended")
        if self._state is not KVPoll.Failed:
            self._state = to

    def abort(self, reason: str) -> None:
        if self._state not in FINAL:
            self._state, self._reason = KVPoll.Failed, reason

    def failure(self) -> str | None:
        return self._reason

    def retries(self) -> int:
        return 0

    def written_pages(self) -> int:
        return 0

    def released(self) -> bool:
        return self._state in FINAL

    def drained(self) -> bool:
        return self._state in FINAL

    def close(self) -> None:
        if self._state not in FINAL:
            raise RuntimeError(f"fake room closed in {self._state.name}")
