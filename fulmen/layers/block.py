"""What a decoder block has beside its attention: residual sum with RMSNorm, gated MLP, and the loss of the head.

    x, normed = norm(x, attention(normed))          AddNorm
    y = (activation(x W_gate) * (x W_up)) W_down    GatedMLP
    losses = linear_cross_entropy(x, W, targets)

On a GPU what lies between products is one kernel in each direction (fused/block.py). Compilers, modes, tensor
subclasses and other devices take PyTorch's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F

from fulmen.boundary import autocasts, is_plain_eager, require_tensors
from fulmen.layers.fused import kernels_for
from fulmen.layers.fused.projections import few_rows, project
from fulmen.layers.inputs import check_device, check_dtype, check_kind, choice, factory, flag, whole
from fulmen.layers.tensor_parallel import local

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu}
MAX_WIDTH = 16384  # features of a token that one program of the norm holds


def block_kernels(*tensors: Tensor) -> Any:
    """The kernels if they take these tensors, else None."""
    return kernels_for("block", *tensors) if all(x.is_contiguous() for x in tensors) else None


class AddNorm(nn.RMSNorm):
    """Residual sum and RMSNorm: x, y to x + y and the norm of that, both in x's dtype; without y, of x.

    A pre-norm block calls it once for each of its parts, with what the part before added:

        x, normed = self.attention_norm(x, y)
        x, normed = self.mlp_norm(x, self.attention(normed))
        return x, self.mlp(normed)
    """

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if y is not None and self._fuses(x, y):
            kernels = block_kernels(x, y, self.weight)
            if kernels is not None:
                added, normed = kernels.Added.apply(self.eps, x, y, self.weight)
                return added, normed
        self._check(x, y)
        x = x if y is None else (x + y).to(x.dtype)
        return x, super().forward(x)

    def _fuses(self, x: Tensor, y: Tensor) -> bool:
        size = self.normalized_shape
        return (
            isinstance(x, Tensor) and isinstance(y, Tensor)
            and self.weight is not None and self.eps is not None and x.shape == y.shape and len(size) == 1
            and x.shape[-1] == size[0] <= MAX_WIDTH and not autocasts(x)
        )  # fmt: skip

    def _check(self, x: Tensor, y: Tensor | None) -> None:
        """What the kernels ask for before they take a call; x may have another dtype than the weight."""
        size = self.normalized_shape
        if not isinstance(x, Tensor) or x.shape[-len(size) :] != size:
            raise _misshapen(x, "normalized_shape", size)
        if not x.is_floating_point():
            raise ValueError(f"x is {x.dtype}, must be a floating-point tensor")
        if self.weight is not None:
            check_device("x", x, self.weight)
        if y is None:
            return
        if not isinstance(y, Tensor) or x.shape != y.shape:
            got = f"has shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"is a {type(y).__name__}"
            raise ValueError(f"y {got}, must have that of x, {tuple(x.shape)}")
        check_device("y", y, x, "x")


class GatedMLP(nn.Module):
    """y = (activation(x W_gate) * (x W_up)) W_down: x (..., embed_dim) to (..., embed_dim).

    hidden_dim  features between the products.
    activation  "silu" (SwiGLU), "gelu" or "relu".
    bias        of all three products.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.hidden_dim = whole("embed_dim", embed_dim), whole("hidden_dim", hidden_dim)
        self.activation: str = choice("activation", activation, *ACTIVATIONS)
        kind = factory(device, dtype) | {"bias": flag("bias", bias)}
        self.gate, self.up = (nn.Linear(self.embed_dim, self.hidden_dim, **kind) for _ in range(2))
        self.down = nn.Linear(self.hidden_dim, self.embed_dim, **kind)

    def reset_parameters(self) -> None:
        """Draws every parameter anew, as after `to_empty` of a layer built on the meta device."""
        for part in (self.gate, self.up, self.down):
            part.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not x.ndim or x.size(-1) != self.embed_dim:
            raise _misshapen(x, "embed_dim", self.embed_dim)
        found: Sequence[Tensor] | None = few_rows(x, self.gate, self.up)  # which knows dtypes and devices by its plan
        if found is None:
            check_kind("x", x, self.gate)
            found = project(x, self.gate, self.up)
        gate, up = found
        kernels = block_kernels(gate, up)
        if kernels is not None:
            y: Tensor = self.down(kernels.Gated.apply(self.activation, gate, up))
        else:
            y = self.down(ACTIVATIONS[self.activation](gate) * up)
        return y

    def check_ranks(self, ranks: int) -> None:
        if self.hidden_dim % ranks:
            raise ValueError(f"hidden_dim={self.hidden_dim} cannot be shared out evenly to {ranks} ranks")

    def tp_plan(self) -> dict[str, ParallelStyle]:
        """For `fulmen.parallel.apply_parallel`: hidden features are shared out."""
        return {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def _misshapen(x: Any, what: str, size: Any) -> ValueError:
    got = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
    return ValueError(f"x {got}, must be a tensor (..., {what}) with {what}={size}")


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of x weight^T and each token's target: losses (tokens,), in fp32 (fp64).

    x        (tokens, size).
    weight   (V, size), of the product that makes logits; they are rounded to x's dtype and not kept in fp32.
    targets  int64 (tokens,), from 0 to V - 1; -100 for a token without a loss. Not checked on a GPU, where the loss of
             any other is NaN or, below 0, zero.
    """
    require_tensors({"x": x, "weight": weight, "targets": targets}, {})
    if isinstance(weight, DTensor) and not all(p.is_replicate() for p in weight.placements):
        raise ValueError(f"weight is shared out over ranks ({weight.placements}): pass weight.full_tensor()")
    weight = local(weight)
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        shapes = f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}"
        raise ValueError(f"{shapes}, must be (tokens, size) and (V, size)")
    check_device("x", x, weight, "weight")
    check_dtype("x", x, weight, "weight")
    if targets.shape != x.shape[:1] or targets.dtype != torch.int64 or targets.device != x.device:
        raise ValueError(
            f"targets is {targets.dtype} {tuple(targets.shape)} on {targets.device}, must be torch.int64 "
            f"({x.shape[0]},) on {x.device}"
        )
    if targets.is_contiguous() and not autocasts(x):
        kernels = block_kernels(x, weight)
        if kernels is not None:
            losses: Tensor = kernels.Loss.apply(x, weight, targets)
            return losses
    _check_targets(targets, weight.shape[0])
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="none")


def _check_targets(targets: Tensor, V: int) -> None:
    """On the CPU, where a look at values costs nothing: each has logits, or no loss."""
    if targets.device.type != "cpu" or not is_plain_eager(targets):
        return
    wrong = targets[((targets < 0) | (targets >= V)) & (targets != -100)]
    if wrong.numel():
        raise ValueError(
            f"targets must be 0 to V - 1 = {V - 1}, or -100 for a token without a loss; {len(wrong)} of "
            f"{len(targets)} are not: {wrong[:8].tolist()}"
        )
