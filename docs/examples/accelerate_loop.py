"""A training loop with accelerate under a recipe, whose checkpoints hold the quantization's state.

python docs/examples/accelerate_loop.py --output out
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn

import fxquant


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same shape."""
        return self.down(nn.functional.gelu(self.up(hidden)))


def trained(args: argparse.Namespace, steps: range) -> nn.Module:
    """Returns the model after `steps`, which begin at the checkpoint if not at 0."""
    torch.manual_seed(0)
    model = Net()
    model.compile(backend=fxquant.Backend(args.recipe, model=model, inner=args.inner))
    accelerator = Accelerator(cpu=args.cpu)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.register_for_checkpointing(fxquant.QuantizationState(model))
    if steps.start:
        accelerator.load_state(args.output)
    for step in steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(accelerator.device)
        accelerator.backward(nn.functional.mse_loss(model(x), x.flip(1)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(args.output)
    return accelerator.unwrap_model(model)


def main(argv: list[str] | None = None) -> None:
    """Trains at once, and in two parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default="accelerate_out", help="the folder of the checkpoint")
    parser.add_argument("--recipe", default="delayed_scaling")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--inner", default="inductor", help="aot_eager begins sooner on a CPU")
    args = parser.parse_args(argv)
    whole = trained(args, range(8))
    trained(args, range(4))
    resumed = trained(args, range(4, 8))
    print(fxquant.report(resumed))
    same = [torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)]
    print("the resumed run has the bits of the whole one:", all(same))


if __name__ == "__main__":
    main()
