"""Trains in MXFP8 forward and NVFP4 backward, beside each of both alone.

A recipe may give the two directions of an operand different formats. The library of factories has such mixtures; the
one used here keeps the random Hadamard transform and the stochastic rounding of NVFP4 training in the backward.

python docs/examples/hybrid_recipe.py --steps 100
"""

import argparse

import torch
from torch import nn

import fxquant
from fxquant import CustomRecipe, factories

RECIPES = {
    "bf16": "high_precision",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "mxfp8 forward, nvfp4 backward": CustomRecipe(qfactory=factories.mxfp8_fwd_nvfp4_bwd),
}


def trained(recipe: fxquant.Recipe | str, args: argparse.Namespace) -> tuple[float, fxquant.Report]:
    """Returns the mean loss of the last ten steps, and the report."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 128))
    teacher = nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 128)).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    compiled = fxquant.compile(model, recipe, options={"inner": args.inner})
    losses = []
    for _ in range(args.steps):
        x = torch.randn(64, 128)
        with torch.autocast("cpu", torch.bfloat16):
            y = compiled(x)
        loss = (y.float() - teacher(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10, fxquant.report(compiled)


def main(argv: list[str] | None = None) -> None:
    """Trains under four recipes, and shows the formats of the six operands of a layer under the last."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--inner", default="aot_eager", help="inductor runs faster, and compiles longer on a CPU")
    args = parser.parse_args(argv)
    for name, recipe in RECIPES.items():
        loss, report = trained(recipe, args)
        print(f"{name}: loss {loss:.5f}, {report.coverage:.0%} of matmul FLOPs quantized", flush=True)
    print(report.table(layer="^0$"))


if __name__ == "__main__":
    main()
