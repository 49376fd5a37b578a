"""Trains blocks on a mesh of two dimensions, FSDP2 by tensor parallel, and resumes on a mesh of another size.

The loop is that of a large trainer: tensor and sequence parallelism within a block, weights gathered quantized over the
other dimension, each block compiled, distributed checkpoints of model, optimizer and quantization state.

torchrun --standalone --nproc-per-node 4 docs/examples/mesh_2d.py --tensor 2 --output out
torchrun --standalone --nproc-per-node 2 docs/examples/mesh_2d.py --tensor 1 --output out --resume --steps 8
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fxquant


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same shape."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A normalized MLP on the residual stream [batch, time, width]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(width), MLP(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same shape."""
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Blocks, one behind the other."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, 4 * width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


PLAN = {
    "norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}
"""The parts of a block over the dimension `tensor` of the mesh; between blocks each rank holds a part of the time."""


def spread(model: Model, args: argparse.Namespace, device: str) -> dist.DeviceMesh:
    """Spreads a model over all ranks, compiles its blocks, and returns the mesh."""
    mesh = init_device_mesh(
        device, (dist.get_world_size() // args.tensor, args.tensor), mesh_dim_names=("data", "tensor")
    )
    if args.tensor > 1:
        cut = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
        joined = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        for layer in model.layers:
            parallelize_module(layer, mesh["tensor"], PLAN)
        parallelize_module(model, mesh["tensor"], {"layers.0": cut, f"layers.{len(model.layers) - 1}": joined})
    fxquant.prepare_fsdp(model, args.recipe, model.layers)  # behind tensor parallelism, before fully_shard
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    fxquant.compile_blocks(model, args.recipe, model.layers, options={"inner": args.inner})
    return mesh


def state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict:
    """Returns what a checkpoint holds."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "quantization": fxquant.QuantizationState(model), "step": step}


def main(argv: list[str] | None = None) -> None:
    """Trains on every rank; the first prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share a layer")
    parser.add_argument("--steps", type=int, default=4, help="the step at which the run ends, with a checkpoint")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--output", default="mesh_out", help="the folder of the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--inner", default="inductor", help="aot_eager begins sooner on a CPU")
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    torch.manual_seed(0)
    model = Model(args.width, depth=2).to(device)
    mesh = spread(model, args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    begin = 0
    if args.resume:
        saved = state(model, optimizer, 0)
        dcp.load(saved, checkpoint_id=args.output)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        begin = saved["step"]

    whole = 4 // mesh["data"].size()  # sequences of this rank: a step has four on every mesh
    for step in range(begin, args.steps):
        x = torch.randn(4, 32, args.width, generator=torch.Generator().manual_seed(step)).to(device)
        x = x.split(whole)[mesh["data"].get_local_rank()]
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fxquant.precompute_scales(model)
        dist.all_reduce(loss, group=mesh["data"].get_group())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item() / mesh['data'].size():.4f}", flush=True)
    dcp.save(state(model, optimizer, args.steps), checkpoint_id=args.output)
    report = fxquant.report(model)
    if dist.get_rank() == 0:
        print(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
