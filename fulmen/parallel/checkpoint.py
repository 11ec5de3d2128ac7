"""Checkpoints of a parallel model: written on one mesh, read on any other, whole or not at all.

`torch.distributed.checkpoint` writes what each rank holds and joins it by the tensors' global shapes. A folder gets its
name when everything in it is written: if a rank dies before, there is no checkpoint, and others are untouched.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.optim import Optimizer


def save(path: str | Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Writes weights, and the optimizer's state, into the new folder `path`; every rank calls it.

    While it is being written the folder is called `path` + ".partial".
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    first = dist.get_rank() == 0
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (str(path), path.exists()))  # all ranks write one folder, or none does
    if len({name for name, _ in told}) > 1:
        raise ValueError(f"path differs between ranks, which write one folder together: {[name for name, _ in told]}")
    if any(there for _, there in told):
        raise FileExistsError(f"{path} exists: a checkpoint gets a folder of its own")
    if first:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that died
    write(_state(model, optimizer), checkpoint_id=partial)
    if first:
        os.replace(partial, path)
    dist.barrier()


def load(path: str | Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Reads what `save` wrote, on whatever mesh, into the model and the optimizer; every rank calls it."""
    path = Path(path)
    if not (path / ".metadata").is_file():
        raise FileNotFoundError(f"{path} is no checkpoint: there is no {path / '.metadata'}")
    state = _state(model, optimizer)
    try:
        read(state, checkpoint_id=path)
    except CheckpointException as error:  # which is no Exception
        raise RuntimeError(f"{path} does not fit the model: {error}") from error
    model.load_state_dict(state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": model.state_dict()}  # torch's helper does not know weights saved by other names
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state
