"""Trains under one recipe after another, goes on from the middle of each in a new process, and compares the bits.

    python docs/demo/resume.py [--steps N] [--recipes NAME ...] [--markdown FILE]

The model, the text and the seeds are those of train.py, on the CPU. Recipes are named as there, as fxquant names them,
or ``factories.NAME`` for one of its library. Exits with 1 when a resumed run differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from train import CPU, read_text, train

from fxquant.recipes import RECIPES
from fxquant.report.text import aligned

LIBRARY = ("mxfp8_fwd_nvfp4_bwd", "mxfp8_fwd_high_precision_bwd", "nvfp4_row_scaled_fwd_mxfp8_bwd")
DEFAULT = ("bf16", *RECIPES, *(f"factories.{name}" for name in LIBRARY))
SEED = 0
TITLES = ("recipe", "final loss", "gap to bf16", "bits after resuming")


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=CPU.steps, help="training steps (default: %(default)s)")
    parser.add_argument("--recipes", nargs="+", default=list(DEFAULT), metavar="NAME", help="default: all built in")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--resume", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = replace(CPU, steps=options.steps)
    if options.resume is not None:
        for i, name in enumerate(options.recipes):
            kept = options.resume / f"{i}.pt"
            run, _ = train(name, config, read_text(), "cpu", "aot_eager", resume=kept, seed=SEED)
            print(f"digest {run.digest}")
        return 0

    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(options.recipes):
            kept = Path(folder) / f"{i}.pt"
            runs.append(train(name, config, read_text(), "cpu", "aot_eager", keep=kept, seed=SEED)[0])
        command = [sys.executable, __file__, "--steps", str(options.steps), "--resume", folder]
        again = subprocess.run([*command, "--recipes", *options.recipes], capture_output=True, text=True, check=False)
    if again.returncode:
        raise SystemExit(again.stderr)
    digests = [line.split()[-1] for line in again.stdout.splitlines() if line.startswith("digest ")]
    table, failed, baseline = [list(TITLES)], False, float("nan")
    for name, run, resumed in zip(options.recipes, runs, digests, strict=True):
        same = resumed == run.digest
        failed |= not same
        baseline = run.final if name == "bf16" else baseline
        table.append([name, f"{run.final:.4f}", f"{run.final - baseline:+.4f}", "identical" if same else "DIFFERENT"])
    print("\n" + aligned(table))
    if options.markdown:
        lines = [table[0], ["---"] * len(TITLES), *table[1:]]
        options.markdown.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
