"""What goes wrong, seen from one of the ranks; `test_failures.py` runs these."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fulmen
from fulmen import parallel
from fulmen.layers import LightningAttention

WAYS = {
    "lightning": parallel.lightning_attention,
    "ring": parallel.ring_attention,
    "ulysses": parallel.ulysses_attention,
}


def rows(H: int = 4, N: int = 8, D: int = 8, dtype=torch.float32, grad: bool = False):
    return [torch.randn(1, H, N, D, dtype=dtype).requires_grad_(grad) for _ in range(3)]


def different_calls(way: str) -> None:
    """Every rank says which rank calls how; the group goes on working."""
    rank, world, attend = dist.get_rank(), dist.group.WORLD, WAYS[way]
    last = rank == dist.get_world_size() - 1
    before = time.monotonic()
    for wrong, message in (
        (rows(N=10 if last else 6), r"ranks do not call alike: tokens=\(6, .* on rank 0.*; tokens=\(10, "),
        (rows(H=8 if last else 4), r"heads=4 on rank 0.*; heads=8 on rank"),
        (rows(D=16 if last else 8), r"D=8 on rank 0.*; D=16 on rank"),
        (rows(dtype=torch.bfloat16 if last else torch.float32), r"dtype=torch.float32 on rank 0.*bfloat16"),
        (rows(grad=last), r"gradients=False on rank 0.*gradients=True on rank"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(*wrong, group=world)
    if last:
        with pytest.raises(ValueError, match="ranks do not call alike: fulmen"):
            WAYS["ring" if way == "lightning" else "lightning"](*rows(N=4), group=world)
    else:
        with pytest.raises(ValueError, match="ranks do not call alike: fulmen"):
            attend(*rows(N=4), group=world)
    assert time.monotonic() - before < 10
    assert attend(*rows(N=12), group=world).shape == (1, 4, 12, 8)


def refused_alone(way: str) -> None:
    """What is wrong by itself is refused by the rank alone: nobody else is in the call."""
    if dist.get_rank() > 0:
        return
    world, attend, P = dist.group.WORLD, WAYS[way], dist.get_world_size()
    q, k, v = rows()
    cases = [
        (ValueError, "group is a int, must be a process group", (q, k, v), {"group": 3}),
        (ValueError, rf"lengths=\(8, 8\): must be one int >= 0 for each of the {P}", (q, k, v), {"lengths": [8, 8]}),
        (ValueError, "rank 0 has N=8 tokens, not 7", (q, k, v), {"lengths": [7] * P}),
        (ValueError, "lengths=5: must be one int", (q, k, v), {"lengths": 5}),
        (ValueError, "lengths=.True, .*must be one int", (q, k, v), {"lengths": [True] * P}),
        (ValueError, "cu_seqlens", (q, k, v), {"cu_seqlens": torch.tensor([], dtype=torch.int32)}),
        (ValueError, "k has head dim 4, must have q's D=8", (q, k[..., :4].contiguous(), v), {}),
        (ValueError, "backend='nothing'", (q, k, v), {"backend": "nothing"}),
        (ValueError, r"backend=\['eager'\]: .* has cuda, eager, .*or 'auto'", (q, k, v), {"backend": ["eager"]}),
        (ValueError, r"backend=None: .* has cuda, eager, .*or 'auto'", (q, k, v), {"backend": None}),
        (ValueError, f"cu_seqlens must end at N={8 * P}", (q, k, v), {"cu_seqlens": torch.tensor([0, 8]).int()}),
    ]
    if way == "lightning":
        slopes = torch.ones(4)
        cases += [
            (ValueError, "'reference' has no backward of its own", (q, k, v), {"backend": "reference"}),
            (ValueError, r"decay has shape \(3,\)", (q, k, v, slopes[:3]), {}),
            (ValueError, "decay must be finite and >= 0", (q, k, v, -slopes), {}),
            (
                NotImplementedError,
                "decay.requires_grad: over ranks .* its gradient is not implemented",
                (q, k, v, slopes.clone().requires_grad_()),
                {},
            ),
            (ValueError, "initial_state has shape", (q, k, v), {"initial_state": torch.zeros(1, 4, 8, 7)}),
        ]
    else:
        short = (q, k[:, :, :4], v[:, :, :4])
        cases += [
            (ValueError, "k has N=4 tokens, must have q's N=8", short, {}),
            (ValueError, "window=5", (q, k, v), {"window": 5}),
            (NotImplementedError, "sdpa", (q, k, v), {"backend": "sdpa", "softcap": 1.0}),
        ]
    if way == "ring":
        cases += [
            (ValueError, "shards='star': must be one of 'contiguous', 'zigzag'", (q, k, v), {"shards": "star"}),
            (ValueError, "two pieces of equal length, and here are N=7", [t[:, :, :7] for t in (q, k, v)],
             {"shards": "zigzag"}),
            (ValueError, "'reference' has no backward of its own", (q, k, v), {"backend": "reference"}),
        ]  # fmt: skip
    if way == "ulysses":
        cases += [
            (ValueError, f"q has 6 heads, which {P} ranks cannot share out evenly: use ring", rows(H=6), {}),
            (ValueError, "k and v have 3 heads and there are 4 ranks", (*rows(H=12)[:1], *rows(H=3)[1:]), {}),
        ]
    for kind, message, given, options in cases:
        with pytest.raises(kind, match=message):
            attend(*given, **{"group": world} | options)
    for call, message in (
        (lambda: parallel.shard(q, world, dim=2, lengths=[1] * P), f"sum to {P}, must sum to N=8"),
        (lambda: parallel.shard(q, world, dim=9), "dim=9: x .* has dimensions -4 to 3"),
        (lambda: parallel.unshard(q, world, dim=9), "dim=9: x .* has dimensions -4 to 3"),
        (lambda: parallel.unshard(q, world, dim="a"), "dim='a'"),
        (lambda: parallel.unshard(q.sum(), world, dim=0), "dim=0"),
        (lambda: parallel.shard(rows(N=9)[0], world, dim=2), r"N=9 tokens cannot be cut in 4 equal pieces: .*lengths="),
        (lambda: parallel.shard(rows(N=4)[0], world, dim=2, shards="zigzag"), "cannot be cut in 8 equal pieces"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def raises_in_time(call, seconds: float, *words: str) -> None:
    before = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
    assert time.monotonic() - before < seconds + 5, "it waited longer than the group's timeout"
    assert all(word in str(caught.value) for word in words), str(caught.value)


def a_rank_dies(way: str, when: str) -> None:
    """The others raise, and say what may have happened, within the group's timeout."""
    rank, world, attend = dist.get_rank(), dist.group.WORLD, WAYS[way]
    dead = dist.get_world_size() - 1
    if when == "before":  # of shapes nobody has seen
        dist.barrier()  # not before the others have met it
        if rank == dead:
            time.sleep(0.5)
            os._exit(7)
        raises_in_time(lambda: attend(*rows(), group=world), 3, "did not come to compare shapes", f"rank {dead} of")
        return
    x = rows(grad=True)
    o = attend(*x, group=world, **({} if way == "lightning" else {"causal": False}))
    if rank == dead:
        os._exit(7)
    if when == "forward":
        raises_in_time(lambda: attend(*x, group=world), 3, "communication failed", f"rank {rank} of")
    else:
        raises_in_time(lambda: o.sum().backward(), 3, "communication failed", f"rank {rank} of")


def a_shape_seen_before(way: str) -> None:
    """One rank goes on as before and another comes with something new: both end within the timeout."""
    world, attend = dist.group.WORLD, WAYS[way]
    attend(*rows(), group=world)
    if dist.get_rank() == 0:
        raises_in_time(lambda: attend(*rows(), group=world), 3, "communication failed")
    else:
        raises_in_time(lambda: attend(*rows(N=6), group=world), 3, "did not come to compare shapes", "rank 0 of 2")


def a_rank_dies_saving(folder: str) -> None:
    """There is no half-written checkpoint, and the one from before is whole."""
    torch.manual_seed(0)
    model = LightningAttention(8, 2)
    parallel.save(f"{folder}/first", model)
    if dist.get_rank() == dist.get_world_size() - 1:
        torch.distributed.checkpoint.FileSystemWriter.write_data = lambda *args, **kwargs: os._exit(7)
    before = time.monotonic()
    with pytest.raises(BaseException):  # noqa: B017, PT011
        parallel.save(f"{folder}/second", model)
    assert time.monotonic() - before < 15
    assert not Path(f"{folder}/second").exists()
    assert Path(f"{folder}/first/.metadata").is_file()


def saving_in_two_places(folder: str) -> None:
    """All ranks are told, and nothing is written."""
    model, rank = LightningAttention(8, 2), dist.get_rank()
    with pytest.raises(ValueError, match="path differs between ranks"):
        parallel.save(f"{folder}/{rank}", model)
    Path(f"{folder}/own{rank}").mkdir()
    with pytest.raises(FileExistsError):
        parallel.save(f"{folder}/own0", model)
    assert not list(Path(folder).glob("*.partial"))


def loading_another_model(folder: str) -> None:
    parallel.save(f"{folder}/one", LightningAttention(8, 2))
    with pytest.raises(RuntimeError, match="does not fit the model"):
        parallel.load(f"{folder}/one", LightningAttention(16, 2))


def a_dtype_that_is_not_moved() -> None:
    """Which is nobody's death."""
    with pytest.raises(TypeError, match="unshard: the group's transport does not move this dtype"):
        parallel.unshard(torch.zeros(1, 4, 8, 8, dtype=torch.int16), dist.group.WORLD, dim=2)


def no_second_derivative(way: str) -> None:
    x = torch.randn(1, 4, 8, 8, requires_grad=True)
    (g,) = torch.autograd.grad(WAYS[way](x, x, x, group=dist.group.WORLD).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        g.square().sum().backward()
    if way != "lightning":
        return
    packed = {"cu_seqlens": torch.tensor([0, 3, 8 * dist.get_world_size()], dtype=torch.int32)}
    for decay in (torch.rand(4), torch.rand(1, 4, 8)):  # a state is moved before it is used
        state = torch.rand(2, 4, 8, 8, requires_grad=True)
        o = WAYS[way](x, x, x, decay, group=dist.group.WORLD, initial_state=state, **packed)
        (g,) = torch.autograd.grad(o.sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            torch.autograd.grad(g.sum() + state.sum(), state)


def one_rank() -> None:
    """A group of one is the single-device operation; no second derivatives."""
    mine = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    q, k, v = rows(grad=True)
    for way, attend in WAYS.items():
        alone = fulmen.lightning_attention if way == "lightning" else fulmen.flash_attention
        torch.testing.assert_close(attend(q, k, v, group=mine), alone(q, k, v))
        grads = torch.autograd.grad(attend(q, k, v, group=mine).square().sum(), (q, k, v), create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            grads[0].sum().backward()


def groups() -> None:
    """A group that does not hold this rank, and one of part of the ranks."""
    rank, P = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    if rank < 2:
        assert parallel.ring_attention(*rows(), group=group).shape == (1, 4, 8, 8)
        return
    with pytest.raises(ValueError, match="group"):
        parallel.ring_attention(*rows(), group=group)
    assert P > 2
