"""Trains blocks under FSDP2 with weights that ranks gather quantized.

torchrun --standalone --nproc-per-node 2 docs/examples/fsdp2_loop.py --recipe mxfp8
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fxquant


class Block(nn.Module):
    """An MLP on the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same shape."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(argv: list[str] | None = None) -> None:
    """Trains on every rank; the first prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--inner", default="inductor", help="aot_eager begins sooner on a CPU")
    args = parser.parse_args(argv)

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128) for _ in range(4))).to(device)
    fxquant.prepare_fsdp(model, args.recipe, list(model))  # before fully_shard
    for block in model:
        fully_shard(block)
    fully_shard(model)
    fxquant.compile_blocks(model, args.recipe, list(model), options={"inner": args.inner})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(args.steps):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(64, 128, generator=generator).to(device)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fxquant.precompute_scales(model)  # one all-reduce for the scales of all weights, where a recipe has such
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item() / dist.get_world_size():.4f}", flush=True)
    if dist.get_rank() == 0:
        print(fxquant.report(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
