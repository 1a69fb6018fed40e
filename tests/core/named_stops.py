"""Stop strings where the text of token i is "<i>"."""

from collections.abc import Sequence

from engine.messages import FinishReason
from engine.sampling_params import SamplingParams


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"<{t}>" for t in tokens)


class NamedStops:
    """A stop ends in the last token, as a token's name is whole."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop

    def look(self, output_ids: Sequence[int]) -> FinishReason | None:
        text = text_of(output_ids)
        found = next((stop for stop in self._stop if text.endswith(stop)), None)
        return None if found is None else FinishReason(kind="stop", matched=found)


def stops_of(sampling: SamplingParams) -> NamedStops | None:
    return NamedStops(sampling.stop) if sampling.stop else None
