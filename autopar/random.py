"""torch's random functions replaced by those of `counter.py`, in a trace and in plain eager code alike.

In: an int64[2] tensor (seed, step).  Out: `Draws`, a function mode that numbers random ops in the order of calls, and
`replay`, with which an untouched eager model draws what the captured program draws.  Next: `attention.py`.

This file and `counter.py` import nothing of the compiler, so that a reference run can use them alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autopar.counter import dropout, uniform
from autopar.errors import UnsupportedError


class Draws(TorchFunctionMode):
    """Replaces torch's random functions by those of this file, numbering them in the order of calls."""

    def __init__(self, rng: Tensor) -> None:
        super().__init__()
        self.rng = rng
        self.op = 0

    def number(self) -> int:
        """The number of the next random op."""
        self.op += 1
        return self.op - 1

    def draw(self, x: Tensor, p: float) -> Tensor:
        """Dropout of `x` as the next random op."""
        return dropout(x, p, self.number(), self.rng)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(self, *args, **(kwargs or {}))
        if func in REFUSED:
            raise UnsupportedError(
                f"random function {func.__name__} is not one that autopar can draw the same way on every device\n"
                "  try: dropout, rand, rand_like, randn, randn_like, bernoulli, or random numbers passed as an input"
            )
        if func is F.multi_head_attention_forward:
            with Patched(self):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def attention(self, *args: Any, **kwargs: Any) -> Tensor:
        """What `F.scaled_dot_product_attention` becomes: torch's own unless it drops out."""
        return replayed_attention(self, *args, **kwargs)


class Patched:
    """Inside, the functions that `torch.nn.functional` calls by its own names go to a mode as well."""

    def __init__(self, mode: Draws) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        self.saved = F.dropout, F.scaled_dot_product_attention
        mode = self.mode
        F.dropout = lambda *args, **kwargs: _f_dropout(mode, *args, **kwargs)
        F.scaled_dot_product_attention = lambda *args, **kwargs: mode.attention(*args, **kwargs)

    def __exit__(self, *exc: object) -> None:
        F.dropout, F.scaled_dot_product_attention = self.saved


def _f_dropout(mode: Draws, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0:
        return input
    out = mode.draw(input, p)
    return input.copy_(out) if inplace else out


def _torch_dropout(mode: Draws, input: Tensor, p: float, train: bool) -> Tensor:
    return _f_dropout(mode, input, p, train)


def _torch_dropout_(mode: Draws, input: Tensor, p: float, train: bool) -> Tensor:
    return _f_dropout(mode, input, p, train, True)


def _channel_dropout(dims: int) -> Callable[..., Tensor]:
    def handler(mode: Draws, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        batched = input.dim() == dims + 2 or dims == 0
        lead = 2 if batched else 1
        ones = torch.ones([*input.shape[:lead], *[1] * (input.dim() - lead)], dtype=input.dtype, device=input.device)
        out = input * mode.draw(ones, p)
        return input.copy_(out) if inplace else out

    return handler


def _sizes(given: tuple[Any, ...], keywords: Mapping[str, Any]) -> Sequence[int]:
    """Sizes as a call may give them: one by one, in one sequence (of none, for a single number), or by keyword."""
    if not given:
        sizes: Sequence[int] = keywords["size"]
        return sizes
    return given[0] if isinstance(given[0], (tuple, list, torch.Size)) else given


def _rand(mode: Draws, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return uniform(_sizes(size, _), dtype or torch.get_default_dtype(), mode.number(), mode.rng)


def _rand_like(mode: Draws, input: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return uniform(input.shape, dtype or input.dtype, mode.number(), mode.rng)


def _normal(mode: Draws, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Normal numbers from two uniform ones (Box and Muller 1958)."""
    radius = 1.0 - uniform(shape, dtype, mode.number(), mode.rng)
    angle = uniform(shape, dtype, mode.number(), mode.rng)
    return (radius.log() * -2.0).sqrt() * (angle * (2.0 * math.pi)).cos()


def _randn(mode: Draws, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _normal(mode, _sizes(size, _), dtype or torch.get_default_dtype())


def _randn_like(mode: Draws, input: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _normal(mode, input.shape, dtype or input.dtype)


def _bernoulli(mode: Draws, input: Tensor, p: float | None = None, **_: Any) -> Tensor:
    dtype = input.dtype if input.dtype.is_floating_point else torch.get_default_dtype()
    below = uniform(input.shape, dtype, mode.number(), mode.rng) < (input.detach() if p is None else p)
    return below.to(input.dtype)


def _bernoulli_(mode: Draws, input: Tensor, p: float | Tensor = 0.5, **_: Any) -> Tensor:
    dtype = input.dtype if input.dtype.is_floating_point else torch.get_default_dtype()
    return input.copy_(uniform(input.shape, dtype, mode.number(), mode.rng) < p)


def _uniform_(mode: Draws, input: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    return input.copy_(uniform(input.shape, input.dtype, mode.number(), mode.rng) * (high - low) + low)


def _normal_(mode: Draws, input: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return input.copy_(_normal(mode, input.shape, input.dtype) * std + mean)


def _attention(mode: Draws, *args: Any, **kwargs: Any) -> Tensor:
    return mode.attention(*args, **kwargs)


def _recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent layer, whose own dropout between layers nobody else could draw."""

    def handler(mode: Draws, *args: Any, **kwargs: Any) -> Any:
        at = next(i for i, arg in enumerate(args) if isinstance(arg, bool))  # bias, layers, dropout, training
        if args[at + 2] > 0 and args[at + 3]:
            raise UnsupportedError(
                f"dropout={args[at + 2]} inside a recurrent layer cannot be drawn the same way on every device\n"
                "  try: one layer at a time with nn.Dropout between them"
            )
        return function(*args, **kwargs)

    return handler


RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)

HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{function: _recurrent(function) for function in RECURRENT},
    F.dropout: _f_dropout,
    torch.dropout: _torch_dropout,
    torch.dropout_: _torch_dropout_,
    F.dropout1d: _channel_dropout(1),
    F.dropout2d: _channel_dropout(0),
    F.dropout3d: _channel_dropout(3),
    torch.rand: _rand,
    torch.rand_like: _rand_like,
    torch.randn: _randn,
    torch.randn_like: _randn_like,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    F.scaled_dot_product_attention: _attention,
}

REFUSED: frozenset[Callable[..., Any]] = frozenset(
    {
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.rrelu,
        F.gumbel_softmax,
        F.fractional_max_pool2d,
        F.fractional_max_pool3d,
        torch.multinomial,
        Tensor.multinomial,
        torch.randint,
        torch.randint_like,
        torch.randperm,
        torch.normal,
        torch.poisson,
        Tensor.random_,
        Tensor.exponential_,
        Tensor.geometric_,
        Tensor.cauchy_,
        Tensor.log_normal_,
    }
)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropped: Callable[[Tensor], Tensor],
) -> Tensor:
    """Attention written out in plain functions; `dropped` is applied to the probabilities."""
    groups = query.shape[-3] // key.shape[-3] if query.dim() > 3 else 1
    if groups > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        rows, columns = scores.shape[-2:]
        causal = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(causal.logical_not(), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return dropped(scores.softmax(-1)) @ value


TORCH_ATTENTION = F.scaled_dot_product_attention  # what stands there inside `Patched` calls the function below


def replayed_attention(
    mode: Draws,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`; with dropout it is written out and draws from the mode."""
    if dropout_p == 0:
        return TORCH_ATTENTION(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return plain_attention(query, key, value, attn_mask, is_causal, scale, lambda p: mode.draw(p, dropout_p))


def replay(seed: int, step: int) -> Draws:
    """`with replay(seed, step):` makes a plain eager forward draw what the captured program draws."""
    return Draws(torch.tensor([seed, step], dtype=torch.int64))
