# ruff: noqa: E402
"""Trains the demo's transformer under every recipe, at two sizes with three seeds, and writes table, plots and reasons.

    python docs/study/study.py [--on cpu|gpu] [--sizes NAME ...] [--recipes NAME ...] [--seeds N] [--minutes M]
                               [--jobs N] [--out DIR]

The text is the standard library's own source. It is meant for half an hour on a GPU, or on a CPU at its small
sizes. Each run is a line of results-cpu.jsonl (or -gpu) once it is over, and is not run again; from these lines the
table in README.md and the plots are made. Models of one recipe compile once: several jobs compile at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
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
    """One run for each seed, all in one compiled model, which begins anew each time.

    A probe measures the last step of the first seed.
    """
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
        generator, seen, start = torch.Generator().manual_seed(seed), list[torch.Tensor](), time.perf_counter()
        rows: list[dict[str, Any]] = []
        for step in range(size.steps):
            places = torch.randint(len(data) - size.length, (size.batch, 1), generator=generator).to(device)
            batch = data[places + window].long()
            measured = step == size.steps - 1 and seed == 0 and name != "high_precision"
            with fxquant.probe(compiled, every=1) if measured else contextlib.nullcontext() as log:
                with torch.autocast(device, dtype=torch.bfloat16) if device == "cuda" else contextlib.nullcontext():
                    loss = compiled(batch[:, :-1], batch[:, 1:])
                loss.backward()
            rows = log.rows if log else rows
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            seen.append(loss.detach())
        losses = [round(loss, 4) for loss in torch.stack(seen).tolist()]
        final = losses[-max(1, size.steps // 5) :]
        yield {
            "size": size.name, "recipe": name, "seed": seed, "final": sum(final) / len(final), "losses": losses,
            "seconds": round(time.perf_counter() - start, 1), "coverage": fxquant.report(compiled).coverage,
            **(reasons(rows) if rows else {}),
        }  # fmt: skip


PRODUCTS = {"fprop": ("input", "rowwise"), "dgrad": ("grad_output", "rowwise"), "wgrad": ("grad_output", "columnwise")}
"""The three products of a layer, each with the operand whose row of a probe has it."""
ZEROS = ("input", "weight", "grad_output")


def reasons(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns what a probe says of a step: errors of products in the norm, the largest shares of operands made zero.

    An error is the geometric mean over the layers whose product is quantized; 0 for none.
    """
    result: dict[str, float] = {}
    for gemm, operand in PRODUCTS.items():
        cosines = [row["cosine"] for row in rows if (row["role"], row["direction"]) == operand]
        errors = [math.sqrt(1 - cosine**2) for cosine in cosines if cosine is not None and cosine < 1]
        result[f"error_{gemm}"] = math.exp(sum(map(math.log, errors)) / len(errors)) if errors else 0.0
    for role in ZEROS:
        shares = [row["underflow"] or 0.0 for row in rows if row["role"] == role]
        result[f"zeros_{role}"] = max(shares, default=0.0)
    return result


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
        numbers = {key: sum(r[key] for r in runs) / len(runs) for key in ("final", "coverage")}
        measured = next((result for result in runs if "error_fprop" in result), {})
        numbers |= {key: measured[key] for key in reasons(()) if key in measured}
        rows.append({"recipe": name, "gap": mean, "spread": spread, "seeds": len(gaps), **numbers})
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
        titles = ("recipe", "loss", "gap", "seeds", "FLOPs quantized", *(f"error of {gemm}" for gemm in PRODUCTS))
        parts.append(f"| {' | '.join(titles)} | zeros of inputs | of weights | of gradients |")
        parts.append(f"|{' --- |' * (len(titles) + 3)}")
        for row in rows:
            gap = "" if row["recipe"] == "high_precision" else f"{row['gap']:+.3f}"
            gap += f" ± {row['spread']:.3f}" if gap and row["seeds"] > 1 else ""
            errors = [f"{row[key]:.2%}" if key in row else "" for key in (f"error_{gemm}" for gemm in PRODUCTS)]
            zeros = [f"{row[key]:.1%}" if key in row else "" for key in (f"zeros_{role}" for role in ZEROS)]
            cells = [row["recipe"], f"{row['final']:.3f}", gap, str(row["seeds"]), f"{row['coverage']:.0%}"]
            parts.append(f"| {' | '.join((*cells, *errors, *zeros))} |")
        parts.append("")
    return "\n".join(parts)


def plot(results: Sequence[dict[str, Any]], sizes: Sequence[Size], path: Path) -> None:
    """The gap of every recipe with its spread, and the gap by the errors of products, forward and of weights."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 5), dpi=130, width_ratios=[3, 2, 2])
    colors = {size.name: color for size, color in zip(sizes, ("#1f77b4", "#d1495b"), strict=True)}
    sizes = [size for size in sizes if rows_of(results, size.name)]
    names = [row["recipe"] for row in rows_of(results, sizes[0].name) if row["recipe"] != "high_precision"]
    for i, size in enumerate(sizes):
        rows = {row["recipe"]: row for row in rows_of(results, size.name)}
        shown = [(y, rows[name]) for y, name in enumerate(names) if name in rows]
        places = [y + 0.16 * (2 * i - 1) for y, _ in shown]
        gaps, spreads = [row["gap"] for _, row in shown], [row["spread"] for _, row in shown]
        look = {"ms": 4, "color": colors[size.name], "label": size.name}
        axes[0].errorbar(gaps, places, xerr=spreads, fmt="o", lw=1.3, **look)
        for axis, gemm in zip(axes[1:], ("fprop", "wgrad"), strict=True):
            measured = [(row[f"error_{gemm}"], row["gap"]) for _, row in shown if f"error_{gemm}" in row]
            axis.plot(*zip(*measured, strict=True), "o", **look) if measured else None
    axes[0].set_yticks(range(len(names)), [name.removeprefix("factories.") for name in names], fontsize=8)
    axes[0].set(xlabel="gap to high precision, nats per byte")
    axes[1].set(xlabel="relative error of a product of the forward", ylabel="gap, nats per byte")
    axes[2].set(xlabel="relative error of a gradient of a weight", ylabel="gap, nats per byte")
    for axis in axes:
        axis.axvline(0, color="#222222", lw=0.8) if axis is axes[0] else axis.axhline(0, color="#222222", lw=0.8)
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


def result_path(options: argparse.Namespace) -> Path:
    """The file with a line for each finished run."""
    return Path(options.out) / f"results-{options.on}.jsonl"


def read_results(path: Path) -> list[dict[str, Any]]:
    """The finished runs of a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


one_at_a_time: Any = contextlib.nullcontext()
"""Held while a line is written."""


def begin(lock: Any, threads: int) -> None:
    """Prepares a process that trains beside others."""
    global one_at_a_time
    one_at_a_time = lock
    torch.set_num_threads(threads)


def train(options: argparse.Namespace, size: Size, name: str) -> None:
    """Trains what has no line yet of a size and a recipe, for which there is time, and adds a line for each run."""
    done = {(result["size"], result["recipe"], result["seed"]) for result in read_results(result_path(options))}
    missing = [seed for seed in range(options.seeds) if (size.name, name, seed) not in done]
    seeds = (seed for seed in missing if time.time() < options.until)
    device = "cpu" if options.on == "cpu" else "cuda"
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}"
    made_by = f"{where}, torch {torch.__version__}, Python {platform.python_version()}, {date.today()}"
    for result in run(size, name, seeds, read_text().to(device), device) if missing else ():
        with one_at_a_time, result_path(options).open("a") as file:
            file.write(json.dumps({**asdict(size), **result, "made": made_by}) + "\n")
        print(f"{size.name} {name} seed {result['seed']}: {result['final']:.3f}, {result['seconds']} s", flush=True)


def train_all(work: Sequence[tuple[argparse.Namespace, Size, str]], jobs: int) -> int:
    """Trains all that is missing in some processes at a time; returns how many recipes failed, which are printed."""
    threads, context = max(1, (os.cpu_count() or 1) // jobs), multiprocessing.get_context("spawn")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    failed = 0
    with ProcessPoolExecutor(jobs, context, begin, (context.Lock(), threads)) as pool:
        for (_, size, name), outcome in [(task, pool.submit(train, *task)) for task in work]:
            if error := outcome.exception():
                failed += 1
                print(f"{size.name} {name} failed: {type(error).__name__}: {error}", flush=True)
    return failed


def main() -> int:
    """Runs what has no line yet, and writes the page; returns an exit code, 1 where a recipe failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=["cpu", "gpu"], default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", nargs="+", metavar="NAME", help="some of both, such as '512 wide'")
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="some of all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after this time (0: none)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that train at a time (default: 1)")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    options.until = time.time() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = CPU if options.on == "cpu" else GPU
    chosen = [size for size in sizes if size.name in (options.sizes or [size.name])]
    work = [(options, size, name) for size in chosen for name in options.recipes or all_recipes(2)]
    failed = train_all(work, options.jobs) if options.minutes else 0
    results = read_results(result_path(options))
    write_page(results, sizes, options.on, options.out)
    try:
        plot(results, sizes, options.out / f"gaps-{options.on}.png")
    except ImportError:
        print("matplotlib is not installed: there is no plot")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
