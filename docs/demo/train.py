"""Trains the same small transformer under bf16 and under every low-precision recipe, and compares.

    python docs/demo/train.py [--steps N] [--out DIR] [--recipes NAME ...] [--inner inductor|aot_eager]

The text is the Python standard library's own source code, byte by byte. Parameters are float32 under bfloat16
autocast in every run; seeds and batches are the same. Writes loss_curves.svg, report.html and results.json.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import platform
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from model import Transformer
from torch import Tensor

import fxquant
from fxquant import CustomRecipe, Report, factories
from fxquant.bench.training import SavedBytes
from fxquant.report import html as report_html
from fxquant.report.text import aligned


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of its training."""

    dim: int
    depth: int
    heads: int
    hidden: int
    batch: int
    length: int
    steps: int
    lr: float


CPU = Config(dim=128, depth=2, heads=4, hidden=384, batch=4, length=128, steps=300, lr=3e-3)
GPU = Config(dim=1024, depth=4, heads=16, hidden=2816, batch=16, length=1024, steps=600, lr=6e-4)


RECIPES: dict[str, Any] = {
    "bf16": None,
    "current_scaling": "current_scaling",
    "rowwise": "rowwise",
    "float8_blockwise": "float8_blockwise",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "mxfp8 fwd, nvfp4 bwd": CustomRecipe(qfactory=factories.mxfp8_fwd_nvfp4_bwd),
}


@dataclass
class Run:
    """One training run gives these losses, bytes and times."""

    name: str
    losses: list[float]
    saved_bytes: int
    compile_seconds: float
    seconds: float
    digest: str
    """Of the bits of all parameters in the end."""
    coverage: float = 0.0

    @property
    def final(self) -> float:
        """The mean loss of the last 20 steps, in nats per byte."""
        last = self.losses[-20:]
        return sum(last) / len(last)


def main() -> None:
    """Runs the demo."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPU if device == "cuda" else CPU
    options = _parse(config)
    config = Config(**{**asdict(config), "steps": options.steps})
    # operators on tensors this small gain little from a second thread, and wait for it when cores are busy
    torch.set_num_threads(1)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)

    data = read_text().to(device)
    matmul_weights = sum(p.numel() for p in Transformer(**_sizes(config)).parameters() if p.dim() == 2)
    print(f"text: {len(data):,} bytes of the Python {platform.python_version()} standard library")
    print(
        f"model: {config.depth} blocks of width {config.dim}, {matmul_weights:,} parameters; "
        f"{config.steps} steps of {config.batch} x {config.length} bytes\n"
        f"on {device}, torch {torch.__version__}, {options.inner}\n"
    )
    runs: list[Run] = []
    reports: dict[str, Report] = {}
    for name in options.recipes:
        run, report = train(name, config, data, device, options.inner)
        runs.append(run)
        if report is not None:
            reports[name] = report
    baseline = next((run.final for run in runs if run.name == "bf16"), float("nan"))

    table = [[*TITLES], *(row(run, baseline) for run in runs)]
    print("\n" + aligned(table))
    if reports:
        name, report = list(reports.items())[-1]
        print(f"\nevery operand of one layer under {name!r}:")
        print(report.table(r"^blocks\.\d+\.mlp\.up$", collapse=True))
    plot(runs, config, out / "loss_curves.svg")
    (out / "report.html").write_text(html(config, table, reports, out / "loss_curves.svg", device), encoding="utf-8")
    results = {
        "config": asdict(config),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "inner": options.inner,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "runs": [{**asdict(run), "final": run.final, "gap": run.final - baseline} for run in runs],
    }
    (out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print("\nwrote " + ", ".join(str(out / name) for name in ("loss_curves.svg", "report.html", "results.json")))


def _parse(config: Config) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=_positive, default=config.steps, help=f"training steps (default: {config.steps})"
    )
    parser.add_argument("--out", default="demo_out", help="where the results go (default: demo_out)")
    parser.add_argument(
        "--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES), metavar="NAME",
        help=f"some of: {'; '.join(RECIPES)}",
    )  # fmt: skip
    parser.add_argument(
        "--inner", choices=["inductor", "aot_eager"], default="inductor" if torch.cuda.is_available() else "aot_eager",
        help="what compiles the graphs; on a CPU, whose formats are emulated, Inductor would take longer than the "
        "training (default: inductor on a GPU, aot_eager on a CPU)",
    )  # fmt: skip
    return parser.parse_args()


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def read_text() -> Tensor:
    """The standard library's source files, one after another in the order of their names, as uint8 [bytes]."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def _sizes(config: Config) -> dict[str, int]:
    return {"dim": config.dim, "depth": config.depth, "heads": config.heads, "hidden": config.hidden}


def recipe_of(name: str) -> fxquant.Recipe | str | None:
    """The recipe of a name: of this demo's, of fxquant's, or of the library of factories (``factories.NAME``)."""
    if name in RECIPES:
        return RECIPES[name]  # type: ignore[no-any-return]
    library, _, factory = name.rpartition(".")
    return CustomRecipe(qfactory=factories.FACTORIES[factory]) if library == "factories" else name


def train(
    name: str, config: Config, data: Tensor, device: str, inner: str, *, keep: Path | None = None,
    resume: Path | None = None, seed: int = 0,
) -> tuple[Run, Report | None]:  # fmt: skip
    """One run under the recipe of that name; the report says what was quantized.

    `keep` is written halfway, with everything that the rest of the run depends on; `resume` is such a file to go on
    from.
    """
    torch.manual_seed(seed)
    torch._dynamo.reset()
    model = Transformer(**_sizes(config)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, total_steps=config.steps + 1, pct_start=0.1)
    recipe = recipe_of(name)
    backend = None if recipe is None else fxquant.Backend(recipe, inner=inner)
    compiled = torch.compile(model, backend=backend or inner)
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(config.length + 1, device=device)

    losses: list[float] = []
    saved_bytes, compile_seconds = 0, 0.0
    progress, started = Progress(name, config.steps), time.perf_counter()
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if resume is not None:
        state = torch.load(resume)
        for key, part in parts.items():
            part.load_state_dict(state[key])
        if backend is not None:
            backend.load_state_dict(state["quantization"])
        generator.set_state(state["generator"])
        losses = state["losses"]
    for step in range(len(losses), config.steps):
        if keep is not None and step == config.steps // 2:
            state = {key: part.state_dict() for key, part in parts.items()}
            state["quantization"] = {} if backend is None else backend.state_dict()
            torch.save({**state, "generator": generator.get_state(), "losses": losses}, keep)
        start = torch.randint(len(data) - config.length, (config.batch, 1), generator=generator).to(device)
        batch = data[start + window].long()
        saved = SavedBytes(model.parameters()) if step == 1 else contextlib.nullcontext()
        with saved, torch.autocast(device, dtype=torch.bfloat16):
            loss = compiled(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if isinstance(saved, SavedBytes):
            saved_bytes = saved.total
        if step == 0:
            compile_seconds = time.perf_counter() - started
        progress.show(step + 1, losses)
    run = Run(name, losses, saved_bytes, compile_seconds, time.perf_counter() - started, digest(model))
    progress.finish(f"{run.final:.3f} nats/byte, {run.seconds:.0f} s ({run.compile_seconds:.0f} s to compile)")
    if backend is None:
        return run, None
    report = backend.report()
    report.recipe = name
    run.coverage = report.coverage
    return run, report


def digest(model: torch.nn.Module) -> str:
    """A hash of the bits of all parameters."""
    made = hashlib.sha256()
    for parameter in model.parameters():
        made.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()[:16]


class Progress:
    """One line that updates on a terminal; a line every tenth of the way elsewhere."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.live = name, steps, sys.stdout.isatty()
        self._write("compiling ...")

    def show(self, step: int, losses: list[float]) -> None:
        mean = sum(losses[-20:]) / len(losses[-20:])
        if self.live or step % max(1, self.steps // 10) == 0:
            filled = 24 * step // self.steps
            bar = f"[{'#' * filled}{'.' * (24 - filled)}] " if self.live else ""
            self._write(f"{bar}step {step}/{self.steps}  loss {mean:.3f}")

    def finish(self, text: str) -> None:
        self._write(text)
        if self.live:
            print()

    def _write(self, text: str) -> None:
        line = f"{self.name:<21} {text}"
        print("\r" + line.ljust(79) if self.live else line, end="" if self.live else "\n", flush=True)


TITLES = ("recipe", "final loss", "gap to bf16", "FLOPs quantized", "saved activations", "seconds", "of it compiling")


def row(run: Run, baseline: float) -> list[str]:
    """A line of the results table, beside the loss in bf16."""
    return [
        run.name,
        f"{run.final:.3f}",
        f"{run.final - baseline:+.3f}",
        f"{100 * run.coverage:.1f}%",
        f"{run.saved_bytes / 2**20:.1f} MiB",
        f"{run.seconds:.0f}",
        f"{run.compile_seconds:.0f}",
    ]


INK, PAPER = "#222222", "#fefefe"
DARK = f"""@media (prefers-color-scheme: dark) {{ [style*="fill: {PAPER}"] {{ fill: #1b1f27 !important }}
[style*="fill: {INK}"] {{ fill: #e4e7eb !important }} [style*="stroke: {INK}"] {{ stroke: #e4e7eb !important }} }}"""
"""The colors of text and paper in the curves, and what they are where the reader's scheme is dark."""


def plot(runs: list[Run], config: Config, path: Path) -> None:
    """Loss curves, smoothed over 20 steps, and the gap of each to bf16."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({name: INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor")})
    plt.rcParams.update({"xtick.color": INK, "ytick.color": INK, "figure.facecolor": PAPER, "axes.facecolor": PAPER})
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fxquant", "font.family": "sans-serif"})
    colors = [INK, "#1f77b4", "#17a2b8", "#4d9a2a", "#d99000", "#d1495b", "#7b4fb5"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), dpi=130)
    smoothed = {run.name: _smooth(run.losses) for run in runs}
    base = smoothed.get("bf16")
    for run, color in zip(runs, colors * 2, strict=False):
        curve = smoothed[run.name]
        steps = range(1, len(curve) + 1)
        left.plot(steps, curve, color=color, lw=2.2 if run.name == "bf16" else 1.3, label=run.name)
        if base is not None and run.name != "bf16":
            right.plot(steps, [a - b for a, b in zip(curve, base, strict=True)], color=color, lw=1.3, label=run.name)
    left.set(xlabel="step", ylabel="nats per byte", title="training loss")
    right.set(xlabel="step", ylabel="nats per byte", title="gap to bf16")
    right.axhline(0, color=INK, lw=1)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    drawn = path.read_text(encoding="utf-8")
    path.write_text(drawn.replace("<defs>", f"<style>{DARK}</style><defs>", 1), encoding="utf-8")


def _smooth(values: list[float], window: int = 20) -> list[float]:
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - window) : i + 1])]


def html(config: Config, table: list[list[str]], reports: dict[str, Report], picture: Path, device: str) -> str:
    """The page: results, curves, and the decisions under every recipe."""
    head = "".join(f"<th class='{'num' if i else ''}'>{escape(c)}</th>" for i, c in enumerate(table[0]))
    body = "".join(
        "<tr>" + "".join(f"<td class='{'num' if i else ''}'>{escape(c)}</td>" for i, c in enumerate(line)) + "</tr>"
        for line in table[1:]
    )
    curves = picture.read_text(encoding="utf-8")
    parts = [
        "<h1>One transformer, one recipe after another</h1>",
        f"<p class='soft'>{config.depth} blocks of width {config.dim}, {config.steps} steps of {config.batch} x "
        f"{config.length} bytes of Python source on {device}, torch {torch.__version__}, same seed and batches</p>",
        f"<div class='scroll' style='margin:16px 0'><table><thead><tr>{head}</tr></thead>",
        f"<tbody>{body}</tbody></table></div>",
        curves[curves.index("<svg") :],
        "<h2>What was quantized</h2>",
    ]
    parts += [
        f"<details><summary>{escape(name)}: {escape(report.totals())}</summary>"
        f"<div>{report_html.section(report, name)}</div></details>"
        for name, report in reports.items()
    ]
    return report_html.page("fxquant demo", "\n".join(parts))


if __name__ == "__main__":
    main()
