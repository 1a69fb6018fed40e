"""A recorder of launches, for any test of steps on the meta device."""

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from engine.kernels.triton.elementwise import TritonElementwise
from engine.kernels.triton.recurrent import TritonRecurrent
from tests.engine.device.launches import Recorder


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found, real_empty = Recorder(), torch.empty

    def empty(*size: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = real_empty(*size, **kwargs)
        return found.pin(made) if pin_memory else made

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: found.pin(x.clone()))

    def run(kernel: JITFunction, *_: Any, FORM: Any = None, **__: Any) -> None:
        found.launches.update([kernel.fn.__name__])
        found.forms |= set() if FORM is None else {FORM.numbers}

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr("engine.layers.recurrence.recurrent_on_gpu", lambda _: TritonRecurrent())
    monkeypatch.setattr("engine.layers.linear.elementwise_for", lambda *_, **__: TritonElementwise())
    for user in ("models.expert_mlp", "layers.linear"):
        monkeypatch.setattr(f"engine.{user}.takes_triton", lambda _: True)
    return found
