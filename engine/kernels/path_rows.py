"""Draft trees in C structures: locations of each row's newest tokens."""

import ctypes

import torch

from engine.kv.step_batch import StepBatch

PATHS = ("path_starts", "path_places")


def fill_paths(to: ctypes.Structure, step: StepBatch, *, positions: int) -> tuple[torch.Tensor, ...]:
    """Set the step's paths; return tensors to keep alive."""
    if step.paths is None:
        to.path_starts = to.path_places = None
        return ()
    kept = step.paths.starts.contiguous(), step.paths.places.contiguous()
    _check(step, *kept, positions=positions)
    to.path_starts, to.path_places = (x.data_ptr() for x in kept)
    to.path_width = kept[1].shape[1]
    return kept


def _check(step: StepBatch, starts: torch.Tensor, places: torch.Tensor, *, positions: int) -> None:
    kv_lens = torch.tensor(step.kv_lens)
    assert starts.dtype == places.dtype == torch.int32, (starts.dtype, places.dtype)
    assert len(starts) == len(places) == len(kv_lens), (starts.shape, places.shape, len(kv_lens))
    first, longest = starts.amin(), (kv_lens - starts).amax()
    assert int(first) >= 0 and int(longest) <= places.shape[1], (starts, step.kv_lens)
    low, high = places.aminmax()
    assert int(low) >= 0 and int(high) < positions, (int(low), int(high), positions)
    assert all(step.kv_lens[i - 1] <= step.kv_lens[i] for i in step.drafted), "rows of a tree come by depth"
