"""Pretrains a small GPT on the source code of the standard library, under any recipe.

python docs/examples/pretrain_gpt.py --recipe mxfp8 --steps 200
python docs/examples/pretrain_gpt.py --recipe bf16 --steps 200
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fxquant


class Block(nn.Module):
    """Causal attention and an MLP, each added to the residual stream [batch, time, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same shape."""
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Bytes [batch, time] to logits [batch, time, 256]."""

    def __init__(self, width: int, depth: int, heads: int, time: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(time, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the next byte."""
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text() -> torch.Tensor:
    """Returns the source code of the standard library as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def main(argv: list[str] | None = None) -> None:
    """Trains, printing the loss in nats a byte, and then what was quantized."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", default="mxfp8", help="a recipe's name, or bf16")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--inner", default="inductor", help="aot_eager begins sooner on a CPU")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    model = GPT(args.width, args.depth, heads=4, time=128).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recipe = "high_precision" if args.recipe == "bf16" else args.recipe
    compiled = torch.compile(model, backend="fxquant", options={"recipe": recipe, "inner": args.inner})

    data = text().to(device)
    for step in range(args.steps):
        starts = torch.randint(len(data) - 129, (8, 1), device=device)
        batch = data[starts + torch.arange(129, device=device)].long()
        with torch.autocast(device, torch.bfloat16):
            logits = compiled(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step}: {loss.item():.3f} nats a byte", flush=True)
    print(fxquant.report(compiled))


if __name__ == "__main__":
    main()
