# ruff: noqa: E402
"""Trains the demo's transformer under every recipe, at two sizes with three seeds, and writes table, plots and reasons.

    python docs/study/study.py [--on cpu|gpu] [--recipes NAME ...] [--seeds N] [--minutes M] [--out DIR]

The text is the standard library's own source. It is meant for half an hour on a GPU, or on a CPU at its small
sizes. Each run is a line of results-cpu.jsonl (or -gpu) once it is over, and is not run again; from these lines the
table in README.md and the plots are made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "demo"))

from model import Transformer
from train import Config, read_text

import fxquant
from fxquant import CustomRecipe, Recipe, factories, recipes


@dataclass(frozen=True)
class Size(Config):
    """A model and its training, with the name of its rows."""

    name: str

    @property
    def parameters(self) -> int:
        """The weights of matmuls in the blocks and the head."""
        return self.depth * (4 * self.dim**2 + 3 * self.dim * self.hidden) + 256 * self.dim


CPU = (
    Size(name="48 wide", dim=48, depth=1, heads=2, hidden=128, batch=4, length=48, steps=60, lr=6e-3),
    Size(name="96 wide", dim=96, depth=2, heads=4, hidden=256, batch=4, length=48, steps=60, lr=4e-3),
)
GPU = (
    Size(name="512 wide", dim=512, depth=4, heads=8, hidden=1408, batch=16, length=512, steps=600, lr=1e-3),
    Size(name="1024 wide", dim=1024, depth=6, heads=16, hidden=2816, batch=16, length=512, steps=600, lr=6e-4),
)


def all_recipes(depth: int) -> dict[str, Recipe]:
    """Every recipe of the study, by the name of its row."""
    named = {name: recipes.get(name) for name in recipes.RECIPES if not name.startswith("weight_only")}
    papers = {f"factories.{name}": CustomRecipe(qfactory=factory) for name, factory in factories.PAPERS.items()}
    mixed = "factories.mxfp8_fwd_nvfp4_bwd"
    ends = {
        mixed: CustomRecipe(qfactory=factories.mxfp8_fwd_nvfp4_bwd),
        "factories.nvfp4_last_layers": CustomRecipe(qfactory=factories.nvfp4_last_layers(depth)),
        "factories.first_and_last_layer(nvfp4)": CustomRecipe(
            qfactory=factories.first_and_last_layer(factories.nvfp4, depth)
        ),
    }
    return {**named, **papers, **ends}


def run(size: Size, name: str, seeds: Iterable[int], data: torch.Tensor, device: str) -> Iterable[dict[str, Any]]:
    """One run for each seed, all in one compiled model, which begins anew each time."""
    torch._dynamo.reset()
    sizes = {"dim": size.dim, "depth": size.depth, "heads": size.heads, "hidden": size.hidden}
    model = Transformer(**sizes).to(device)
    recipe = all_recipes(size.depth)[name]
    inner = "inductor" if device == "cuda" else "aot_eager"
    window, compiled = torch.arange(size.length + 1, device=device), None
    for seed in seeds:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter, first in zip(model.parameters(), Transformer(**sizes).parameters(), strict=True):
                parameter.copy_(first)
        if compiled is None or compiled.quantization_state_dict():  # scales, and steps of random bits, begin anew too
            compiled = fxquant.compile(model, recipe, options={"inner": inner})
        optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, size.lr, total_steps=size.steps + 1, pct_start=0.1)
        generator, losses, start = torch.Generator().manual_seed(seed), list[float](), time.perf_counter()
        for _ in range(size.steps):
            places = torch.randint(len(data) - size.length, (size.batch, 1), generator=generator).to(device)
            batch = data[places + window].long()
            with torch.autocast(device, dtype=torch.bfloat16) if device == "cuda" else contextlib.nullcontext():
                loss = compiled(batch[:, :-1], batch[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            losses.append(round(loss.item(), 4))
        final = losses[-max(1, size.steps // 5) :]
        yield {
            "size": size.name, "recipe": name, "seed": seed, "final": sum(final) / len(final), "losses": losses,
            "seconds": round(time.perf_counter() - start, 1), "coverage": fxquant.report(compiled).coverage,
            **reasons(model, recipe, batch),
        }  # fmt: skip


def reasons(model: torch.nn.Module, recipe: Recipe, batch: torch.Tensor) -> dict[str, float]:
    """Returns the mean error of a product in the trained model's forward, and the most that becomes zero."""
    losses = fxquant.measure(model, recipe, batch[:, :-1], batch[:, 1:]).losses
    if not losses:
        return {"error": 0.0, "zeros_input": 0.0, "zeros_weight": 0.0}
    most = {name: max((row.lost.get(name, 0.0) for row in losses), default=0.0) for name in ("input", "weight")}
    error = math.exp(sum(math.log(max(row.error, 1e-9)) for row in losses) / len(losses))
    return {"error": error, **{f"zeros_{name}": value for name, value in most.items()}}


def rows_of(results: Sequence[dict[str, Any]], size: str) -> list[dict[str, Any]]:
    """A row for each recipe: gaps to high precision with the same seed, their mean and their spread over seeds."""
    of_size = [result for result in results if result["size"] == size]
    base = {result["seed"]: result["final"] for result in of_size if result["recipe"] == "high_precision"}
    rows = []
    for name in dict.fromkeys(result["recipe"] for result in of_size):
        runs = [result for result in of_size if result["recipe"] == name and result["seed"] in base]
        gaps = [result["final"] - base[result["seed"]] for result in runs]
        if not gaps:
            continue
        mean = sum(gaps) / len(gaps)
        spread = (max(gaps) - min(gaps)) / 2
        numbers = {key: sum(r[key] for r in runs) / len(runs) for key in ("final", "coverage", "error")}
        zeros = {key: max(r[key] for r in runs) for key in ("zeros_input", "zeros_weight")}
        rows.append({"recipe": name, "gap": mean, "spread": spread, "seeds": len(gaps), **numbers, **zeros})
    return sorted(rows, key=lambda row: row["gap"])


def table(results: Sequence[dict[str, Any]], sizes: Sequence[Size]) -> str:
    """The results as a page of Markdown."""
    parts = []
    for size in sizes:
        rows = rows_of(results, size.name)
        if not rows:
            continue
        head = f"### {size.name}: {size.depth} blocks, {size.parameters:,} weights, {size.steps} steps of "
        parts.append(f"{head}{size.batch} x {size.length} bytes\n")
        parts.append("| recipe | loss | gap | FLOPs quantized | error of a product | zeros of inputs | of weights |")
        parts.append("| --- | --- | --- | --- | --- | --- | --- |")
        for row in rows:
            gap = "" if row["recipe"] == "high_precision" else f"{row['gap']:+.3f} ± {row['spread']:.3f}"
            zeros = [f"{row[key]:.1%}" for key in ("zeros_input", "zeros_weight")]
            cells = [row["recipe"], f"{row['final']:.3f}", gap, f"{row['coverage']:.0%}", f"{row['error']:.2%}", *zeros]
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def plot(results: Sequence[dict[str, Any]], sizes: Sequence[Size], path: Path) -> None:
    """The gap of every recipe with its spread, and the gap by the error of a product."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 5), dpi=130, width_ratios=[3, 2])
    colors = ("#1f77b4", "#d1495b")
    names = [row["recipe"] for row in rows_of(results, sizes[0].name) if row["recipe"] != "high_precision"]
    for i, size in enumerate(sizes):
        rows = {row["recipe"]: row for row in rows_of(results, size.name)}
        shown = [(y, rows[name]) for y, name in enumerate(names) if name in rows]
        places = [y + 0.16 * (2 * i - 1) for y, _ in shown]
        gaps, spreads = [row["gap"] for _, row in shown], [row["spread"] for _, row in shown]
        axes[0].errorbar(gaps, places, xerr=spreads, fmt="o", ms=4, lw=1.3, color=colors[i], label=size.name)
        axes[1].plot([row["error"] for _, row in shown], gaps, "o", ms=4, color=colors[i], label=size.name)
    axes[0].set_yticks(range(len(names)), [name.removeprefix("factories.") for name in names], fontsize=8)
    axes[0].set(xlabel="gap to high precision, nats per byte")
    axes[1].set(xlabel="relative error of a product", ylabel="gap, nats per byte")
    for axis in axes:
        axis.axhline(0, color="#222222", lw=0.8) if axis is axes[1] else axis.axvline(0, color="#222222", lw=0.8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def write_page(results: Sequence[dict[str, Any]], sizes: Sequence[Size], place: str, out: Path) -> None:
    """Puts the table of a place between its marks in README.md, with what it was made by."""
    page = out / "README.md"
    mark = f"<!-- results: {place} -->"
    versions = {result["made"] for result in results}
    picture = f"![gaps on a {place}](gaps-{place}.png)"
    text = f"{mark}\n{'; '.join(sorted(versions))}.\n\n{table(results, sizes)}\n{picture}\n<!-- end -->"
    before = page.read_text(encoding="utf-8") if page.exists() else f"# Study\n\n{mark}\n<!-- end -->\n"
    if mark not in before:
        before += f"\n{mark}\n<!-- end -->\n"
    page.write_text(re.sub(rf"{mark}\n.*?<!-- end -->", lambda _: text, before, flags=re.S), encoding="utf-8")


def main() -> None:
    """Runs what has no line yet, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=["cpu", "gpu"], default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="some of all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after this time")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    sizes, device = (CPU, "cpu") if options.on == "cpu" else (GPU, "cuda")
    if device == "cpu":
        torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"results-{options.on}.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(result["size"], result["recipe"], result["seed"]) for result in results}
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}"
    made_by = f"{where}, torch {torch.__version__}, Python {platform.python_version()}, {date.today()}"
    data, start = read_text().to(device), time.monotonic()
    for name in options.recipes or all_recipes(2):
        for size in sizes:
            if time.monotonic() - start > 60 * options.minutes:
                break
            seeds = [seed for seed in range(options.seeds) if (size.name, name, seed) not in done]
            for result in run(size, name, seeds, data, device) if seeds else ():
                results.append({**result, "made": made_by})
                with path.open("a") as file:
                    file.write(json.dumps({**asdict(size), **results[-1]}) + "\n")
                outcome = f"{result['final']:.3f}, {result['seconds']} s"
                print(f"{size.name} {name} seed {result['seed']}: {outcome}", flush=True)
    write_page(results, sizes, options.on, options.out)
    try:
        plot(results, sizes, options.out / f"gaps-{options.on}.png")
    except ImportError:
        print("matplotlib is not installed: there is no plot")


if __name__ == "__main__":
    main()
