"""Context parallelism of a layer: the operations it calls when its tokens are cut over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch._compile import _disable_dynamo

from fulmen.layers.inputs import packed_positions
from fulmen.parallel.groups import Group, ranks_of
from fulmen.parallel.lightning import lightning_attention
from fulmen.parallel.ring import ring_attention
from fulmen.parallel.shards import Cut
from fulmen.parallel.ulysses import ulysses_attention

if TYPE_CHECKING:
    from fulmen.layers.inputs import Rows
    from fulmen.layers.rotary import Rotary
    from fulmen.layers.softmax import Options

SOFTMAX = ("ring", "ulysses")


class ContextParallel(NamedTuple):
    """Set as a layer's `cp` by `apply_parallel`: x holds this rank's tokens, as many as on every other rank.

    group    the ranks a sequence is cut over.
    softmax  "ring" or "ulysses": how softmax attention sees the other ranks' tokens.
    shards   "contiguous" or "zigzag".
    dim      the ranks' dimension of the mesh, if it has a name.
    """

    group: Group
    softmax: str = "ring"
    shards: str = "contiguous"
    dim: str | None = None

    def __deepcopy__(self, memo: Any) -> ContextParallel:
        """Of a copy of the layer: the same ranks."""
        return self

    def refuse(self, x: Tensor, mask: Any, cache: Any, cu_seqlens: Tensor | None) -> None:
        """Raises for arguments that a layer does not take over ranks."""
        if mask is not None:
            raise ValueError("mask is given to a layer whose tokens are cut over ranks: pack sequences with cu_seqlens")
        if cache is not None:
            raise ValueError("cache is given to a layer whose tokens are cut over ranks: generate without cp")
        if cu_seqlens is not None and x.shape[0] != 1:
            raise ValueError(f"cu_seqlens packs sequences along N, so B must be 1; got x {tuple(x.shape)}")

    @_disable_dynamo  # unlike torch.compiler.disable, imports no compiler here
    def rotations(self, rope: Rotary, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos and sin of x's tokens, by their places in the whole sequence, or in their own of packed ones."""
        ranks, N = ranks_of(self.group), x.shape[1]
        cut = Cut(self.shards, (N,) * ranks.size)
        if cu_seqlens is None and self.shards == "contiguous":
            return rope.span(cut.begin(ranks.rank), N, x.device, x.dtype)
        places = cut.positions(ranks.rank, x.device)
        return rope(places if cu_seqlens is None else packed_positions(places, cu_seqlens), x.dtype)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, sinks: Tensor | None, rows: Rows | None
    ) -> Tensor:
        """Softmax attention (B, H, N, E); `rows` are packed sequences, if any."""
        cu_seqlens = None if rows is None else rows.offsets(q.shape[2], k.shape[2])[0]
        given: dict[str, Any] = {**options._asdict(), "sinks": sinks, "cu_seqlens": cu_seqlens, "group": self.group}
        if self.softmax == "ring":
            return ring_attention(q, k, v, shards=self.shards, **given)
        return ulysses_attention(q, k, v, **given)

    def lightning(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, scale: float, backend: str,
        cu_seqlens: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return lightning_attention(
            q, k, v, decay, group=self.group, scale=scale, cu_seqlens=cu_seqlens, backend=backend
        )
