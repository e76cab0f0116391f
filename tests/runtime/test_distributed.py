"""Models under DistributedDataParallel and FSDP2: two processes on this machine, over gloo."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from tests.runtime.test_operator import Layer

WORLD = 2


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(Layer(), Layer())


def _batch() -> torch.Tensor:
    return torch.randn(2 * WORLD, 12, 8, generator=torch.Generator().manual_seed(1))


def _steps(model: torch.nn.Module, x: torch.Tensor) -> list[float]:
    """The losses of three steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _process(rank: int, port: int, kind: str, compiled: bool, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    model = _model()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in (*model.children(), model):
            fully_shard(layer, mesh=mesh)
    if compiled:
        model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    losses = _steps(model, _batch().chunk(WORLD)[rank])
    torch.save(losses, Path(folder) / f"{rank}.pt")
    dist.barrier()
    # Gloo's destructor waits for a thread with Python's lock held: if that thread wants it, none ever ends.
    os._exit(0)


@pytest.mark.parametrize(
    ("kind", "compiled"), [("ddp", False), ("ddp", True), ("fsdp", False), ("fsdp", True)]
)
def test_two_processes_train_as_one(kind: str, compiled: bool, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(_process, (port, kind, compiled, str(tmp_path)), nprocs=WORLD)
    each = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    mean = [sum(losses) / WORLD for losses in zip(*each, strict=True)]
    assert mean == pytest.approx(_steps(_model(), _batch()), rel=1e-5)
    assert mean[-1] < mean[0]
