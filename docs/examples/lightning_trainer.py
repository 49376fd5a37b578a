"""Trains a model by Lightning's Trainer under a recipe, saves a checkpoint, and resumes it.

python docs/examples/lightning_trainer.py --output out
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxquant
from fxquant.integrations.lightning import QuantizationCallback


class Regression(LightningModule):
    """Learns to reverse vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (x,) = batch
        return nn.functional.mse_loss(self.model(x), x.flip(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trained(args: argparse.Namespace, steps: int, resumed: Path | None = None) -> Regression:
    """Returns the model after `steps`, which began at a checkpoint if one is given."""
    torch.manual_seed(0)
    model, data = Regression(), TensorDataset(torch.randn(128, 64))
    trainer = Trainer(
        max_steps=steps, default_root_dir=args.output, logger=False, enable_progress_bar=False, accelerator=args.device,
        callbacks=[QuantizationCallback(args.recipe, modules="model", inner=args.inner)],
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, 128), ckpt_path=None if resumed is None else str(resumed), weights_only=True)
    trainer.save_checkpoint(Path(args.output) / f"step{steps}.ckpt")
    return model


def main(argv: list[str] | None = None) -> None:
    """Trains at once, and in two parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default="lightning_out", help="the folder of checkpoints")
    parser.add_argument("--recipe", default="delayed_scaling")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--inner", default="inductor", help="aot_eager begins sooner on a CPU")
    args = parser.parse_args(argv)
    whole = trained(args, 8)
    trained(args, 4)
    resumed = trained(args, 8, Path(args.output) / "step4.ckpt")
    print(fxquant.report(resumed))
    same = [torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)]
    print("the resumed run has the bits of the whole one:", all(same))


if __name__ == "__main__":
    main()
