"""Transformers in float64, and how far from it rounding alone may bring an fp32 program.

The second is Monte Carlo arithmetic (Parker 1997, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic"):
copies of the same run in float64, in which each operation is off at random by up to half an ulp of fp32. Where a model is
ill-conditioned, as a gated norm of a state near 0 is, the copies spread as far as fp32 programs do. Neither the answer nor the spread
depends on the CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

COPIES = 8
HALF_ULP = 2.0**-24
# A product of fp32 rounds at each of its terms, that of a copy once: a right program is some spreads away. Over all families, with
# SSE, AVX2, AVX-512, AMX, three orders of summation and without a C compiler, the engine's worst token is 9 spreads off (the median
# 3), that of transformers in fp32 11.
MOST_SPREADS = 16.0
_ELEMENTWISE = ("add", "sub", "mul", "div", "pow", "exp", "rsqrt", "tanh", "sigmoid", "softplus", "silu", "gelu")
_SUMS = ("sum", "mean", "cumsum", "softmax", "layer_norm", "conv1d", "linear", "matmul", "einsum")
ROUNDED = frozenset((*_ELEMENTWISE, *_SUMS, "linalg_solve_triangular"))


class Exact(NamedTuple):
    """`value` [rows, n] and `copies` [COPIES, rows, n], float64."""

    value: Tensor
    copies: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """What `function` of one run's rows is, exactly and in each copy. Rows may become fewer."""
        return type(self)(function(self.value), function(self.copies))

    def bound(self) -> Tensor:
        """[rows]: how far any number of a row may be off."""
        spread = (self.copies - self.value).square().mean(0).sqrt()
        return MOST_SPREADS * spread.amax(-1)

    def check(self, found: Tensor) -> None:
        """Assert that `found` [rows, n] is `value` but for rounding."""
        assert found.shape == self.value.shape, (found.shape, self.value.shape)
        shares = (found.double() - self.value).abs().amax(-1) / self.bound()
        row = int(shares.argmax())
        assert shares[row] < 1, f"row {row} is off by {shares[row]:.2f} times what rounding explains"


class Float64Oracle:
    """One checkpoint. Answers are kept: tests ask for the same prompt again and again."""

    def __init__(self, path: str) -> None:
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # fused kernels refuse float64
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **eager)
        self._arithmetic = _Float64()
        for module in self._model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.register_forward_pre_hook(self._arithmetic.pause)
                module.register_forward_hook(self._arithmetic.resume)
        self._answers: dict[tuple[str, tuple[int, ...]], Exact] = {}

    def logits(self, ids: Sequence[int]) -> Exact:
        """Rows: tokens; columns: the vocabulary."""
        return self._answer("logits", lambda batch: self._model(batch).logits, ids)

    def logprobs(self, ids: Sequence[int]) -> Exact:
        return self.logits(ids).map(lambda logits: logits.log_softmax(-1))

    def states(self, ids: Sequence[int]) -> Exact:
        """Rows: tokens; columns: the hidden state after the final norm."""
        return self._answer("states", lambda batch: self._model.model(batch).last_hidden_state, ids)

    @torch.inference_mode()
    def _answer(self, name: str, run: Callable[[Tensor], Tensor], ids: Sequence[int]) -> Exact:
        key = name, tuple(ids)
        if key not in self._answers:
            with self._arithmetic.rounding(0.0):
                value = run(torch.tensor([ids]))[0]
            with self._arithmetic.rounding(HALF_ULP):
                self._answers[key] = Exact(value, run(torch.tensor([ids] * COPIES)))
        return self._answers[key]


class _Float64(TorchFunctionMode):
    """Makes each fp32 of a model's code float64, except in the angles of RoPE: fp32 is part of their definition."""

    def __init__(self) -> None:
        super().__init__()
        self._error, self._paused, self._generator = 0.0, False, torch.Generator()

    def rounding(self, error: float) -> Self:
        """`error`: relative, the largest of an operation; 0.0: none."""
        self._error = error
        self._generator.manual_seed(0)
        return self

    def pause(self, *_: object) -> None:
        self._paused = True

    def resume(self, *_: object) -> None:
        self._paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        func = torch.Tensor.double if func is torch.Tensor.float else func
        out = func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})
        return self._rounded(out) if self._error and func.__name__ in ROUNDED else out

    def _rounded(self, out: Tensor) -> Tensor:
        if not out.is_floating_point():
            return out
        errors = torch.empty(out.shape, dtype=torch.float32).uniform_(
            -self._error, self._error, generator=self._generator
        )
        return out * (1 + errors.double())


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
