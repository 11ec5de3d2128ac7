"""One sequence over several ranks: lightning, ring and Ulysses attention, forward and backward.

torchrun --nproc-per-node 2 examples/context_parallel.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fulmen
from fulmen import parallel


def main() -> None:
    B, H, N, D = 1, 4, 256, 32
    device = "cuda" if torch.cuda.is_available() else "cpu"

    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    cp = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))

    torch.manual_seed(0)  # the same sequence on every rank
    whole = [torch.randn(B, H, N, D, device=device) for _ in range(3)]
    decay = fulmen.decay.alibi(H).to(device)
    q, k, v = (parallel.shard(x, cp, dim=2).clone().requires_grad_() for x in whole)  # this rank's tokens

    calls = {
        "lightning": (
            parallel.lightning_attention(q, k, v, decay, group=cp),
            fulmen.lightning_attention(*whole, decay),
        ),
        "ring": (parallel.ring_attention(q, k, v, group=cp, causal=True), fulmen.flash_attention(*whole, causal=True)),
        "ulysses": (parallel.ulysses_attention(q, k, v, group=cp), fulmen.flash_attention(*whole)),
    }
    for name, (o, expected) in calls.items():
        o.square().mean().backward()  # every rank runs it
        error = (parallel.unshard(o.detach(), cp, dim=2) - expected).abs().max() / expected.abs().max()
        if dist.get_rank() == 0:
            print(f"{name}: {dist.get_world_size()} ranks differ from one by {error:.1e}")
        assert error < 1e-4


main()
dist.destroy_process_group()  # here nobody holds the group: its threads end before Python does
