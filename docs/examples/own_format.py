"""Invents a format, measures what it loses, and trains in it.

One is MXINT8 (OCP Microscaling Formats 1.0, section 5): blocks of 32 integers of 8 bits share a power of two. Formats
are given by their parameters, or as a class of one's own, which may do whatever torch can.

python docs/examples/own_format.py --steps 50
"""

import argparse
from dataclasses import dataclass

import torch
from torch import nn

import fxquant
from fxquant import BlockQuantizer, CustomRecipe, QuantizedTensor, Quantizer, Rule, Rules
from fxquant.quantizers import QuantizedOperand


@dataclass(frozen=True)
class Clipped(Quantizer):
    """Integers of 8 bits with a scale a row, the largest 1% of whose elements saturate."""

    alignment = 1

    def quantize(self, x: torch.Tensor, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        """Returns x [M, N] in the directions that are asked for, columnwise transposed."""

        def half(t: torch.Tensor) -> QuantizedOperand:
            place = max(1, round(0.99 * t.shape[-1]))
            largest = t.abs().float().kthvalue(place, dim=-1, keepdim=True).values.clamp(min=1e-12)
            codes = (t * (127 / largest)).round().clamp(-127, 127).to(torch.int8)
            return QuantizedOperand(codes, largest / 127)

        return QuantizedTensor(half(x) if rowwise else None, half(x.mT) if columnwise else None)

    def dequantize(self, operand: QuantizedOperand) -> torch.Tensor:
        """Returns the float32 numbers that codes stand for."""
        return operand.data.float() * operand.scale


def recipe_of(quantizer: Quantizer) -> CustomRecipe:
    """Returns a recipe that gives every operand of every linear layer one quantizer."""
    return CustomRecipe(qfactory=Rules([Rule(quantizer, module_type="linear")]))


QUANTIZERS = {
    "MXINT8": BlockQuantizer(element="int8", block=(1, 32), scale="e8m0"),
    "FP6 in blocks of 16": BlockQuantizer(element="e2m3", block=(1, 16), scale="e8m0"),
    "int8, clipped": Clipped(),
}


def main(argv: list[str] | None = None) -> None:
    """Measures each format on one step, and trains in it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--formats", nargs="+", choices=list(QUANTIZERS), default=list(QUANTIZERS))
    args = parser.parse_args(argv)
    for name in args.formats:
        quantizer = QUANTIZERS[name]
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        recipe = recipe_of(quantizer)
        x = torch.randn(64, 128)
        errors = fxquant.measure(model, recipe, x).losses
        print(f"{name}: largest relative error of a product {max(loss.error for loss in errors):.4f}")
        compiled = fxquant.compile(model, recipe, options={"inner": "aot_eager"})
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for _ in range(args.steps):
            x = torch.randn(64, 128)
            loss = (compiled(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"{name}: loss {loss.item():.4f} after {args.steps} steps", flush=True)


if __name__ == "__main__":
    main()
