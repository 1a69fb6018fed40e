"""Transformers in float64, and how far from it rounding alone may bring an fp32 program.

The second is Monte Carlo arithmetic (Parker 1997, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic"):
copies of the same run in float64, in which each operation is off at random by up to half an ulp of fp32. Where a model is
ill-conditioned, as a gated norm of a state near 0 is, the copies spread as far as fp32 programs do. Neither the answer nor the spread
depends on the CPU.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

COPIES = 8
HALF_ULP = 2.0**-24
POOL = 1 << 22  # errors that are drawn once: each result takes as many as it has numbers, from a place drawn anew
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
    """One checkpoint. Answers are kept: tests ask for the same prompt again and again, and a decoder's rows are those of a longer one."""

    def __init__(self, path: str) -> None:
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # fused kernels refuse float64
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **eager)
        self._arithmetic = _Float64()
        for module in self._model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.register_forward_pre_hook(self._arithmetic.pause)
                module.register_forward_hook(self._arithmetic.resume)
        self._model.model.register_forward_hook(self._keep_states)
        self._states = torch.empty(0)
        self._answers: dict[tuple[int, ...], _Answer] = {}

    def logits(self, ids: Sequence[int]) -> Exact:
        """Rows: tokens; columns: the vocabulary."""
        return self._answer(ids).logits.map(lambda rows: rows[..., : len(ids), :])

    def logprobs(self, ids: Sequence[int]) -> Exact:
        return self.logits(ids).map(lambda logits: logits.log_softmax(-1))

    def states(self, ids: Sequence[int]) -> Exact:
        """Rows: tokens; columns: the hidden state after the final norm."""
        return self._answer(ids).states.map(lambda rows: rows[..., : len(ids), :])

    def _answer(self, ids: Sequence[int]) -> "_Answer":
        key = tuple(ids)
        found = next((answer for known, answer in self._answers.items() if known[: len(key)] == key), None)
        if found is None:
            found = self._answers[key] = self._computed(key)
        return found

    @torch.inference_mode()
    def _computed(self, ids: tuple[int, ...]) -> "_Answer":
        with self._arithmetic.rounding(rounds=False):
            logits, states = self._run([ids])
        with self._arithmetic.rounding(rounds=True):
            near_logits, near_states = self._run([ids] * COPIES)
        return _Answer(Exact(logits[0], near_logits), Exact(states[0], near_states))

    def _run(self, batch: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        logits: Tensor = self._model(torch.tensor(batch)).logits
        return logits, self._states

    def _keep_states(self, _: object, __: object, output: Any) -> None:
        self._states = output.last_hidden_state


class _Answer(NamedTuple):
    logits: Exact
    states: Exact


@cache
def _factors() -> Tensor:
    """[POOL]: what rounding makes of 1."""
    errors = torch.empty(POOL, dtype=torch.float64).uniform_(
        -HALF_ULP, HALF_ULP, generator=torch.Generator().manual_seed(0)
    )
    return errors.add_(1)


class _Float64(TorchFunctionMode):
    """Makes each fp32 of a model's code float64, except in the angles of RoPE: fp32 is part of their definition."""

    def __init__(self) -> None:
        super().__init__()
        self._rounds, self._paused, self._random = False, False, random.Random()

    def rounding(self, rounds: bool) -> Self:
        """`rounds`: whether operations are off by as much as rounding may bring."""
        self._rounds = rounds
        self._random.seed(0)
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
        return self._rounded(out) if self._rounds and func.__name__ in ROUNDED else out

    def _rounded(self, out: Tensor) -> Tensor:
        if not out.is_floating_point():
            return out
        factors = _factors()
        if out.numel() > POOL // 2:
            factors = factors.repeat(2 + out.numel() // POOL)
        begin = self._random.randrange(POOL // 2)
        return out.mul_(factors[begin : begin + out.numel()].view(out.shape))


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
