"""Writes the parts of README.md and docs/ that come from code, between their markers: ``make docs``."""

from __future__ import annotations

import argparse
import bisect
import contextlib
import importlib.util
import io
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import torch

import fxquant
from fxquant import __main__ as command_line
from fxquant.__main__ import factory_rows, format_rows, recipe_rows
from fxquant.bench.run import BENCHMARKS
from fxquant.cost.sharding import DECODERS, Mesh, state_bytes, traffic
from fxquant.decisions import SkipReason
from fxquant.formats import ELEMENTS, QuantSpec
from fxquant.kernels.cast import reference
from fxquant.passes import pipeline
from fxquant.passes.pipeline import Pass
from fxquant.recipes import RECIPES
from fxquant.roles import Direction

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def examples(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return EXAMPLE.findall(page.read_text(encoding="utf-8"))


def run_example(code: str) -> str:
    """Runs an example without Inductor, which none of them is about, and returns what it prints."""
    torch._dynamo.reset()  # nothing of another example counts
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace('options={"recipe"', 'options={"inner": "aot_eager", "recipe"'), {"__name__": "example"})
    return printed.getvalue()


def markdown(rows: list[dict[str, str]]) -> str:
    """Rows with equal keys as a Markdown table."""
    cells = [[value.replace("|", "\\|") for value in row.values()] for row in rows]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def recipe_settings() -> str:
    """Named recipes with the class behind each and the fields of the class."""
    rows = []
    for name, recipe in RECIPES.items():
        settings = ", ".join(f"`{field.name}`" for field in fields(recipe) if field.repr) or "none"
        rows.append({"name": f"`{name}`", "class": f"`{type(recipe).__name__}`", "settings": settings})
    return markdown(rows)


def load(path: Path) -> ModuleType:
    """A module from a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def invariant_rows() -> list[dict[str, str]]:
    """The invariants of TransformerEngine and the tests that hold them."""
    rows: list[dict[str, str]] = load(ROOT / "tests" / "invariants.py").rows()
    return rows


def element_rows() -> list[dict[str, str]]:
    """One row for each element, as text."""
    return [
        {
            "element": e.name,
            "bits": str(e.bits),
            "smallest": f"{e.smallest_normal * 2**-e.mantissa_bits:.3g}",
            "smallest normal": "-" if e.exponent_bits == 0 else f"{e.smallest_normal:.3g}",
            "largest": f"{e.max:g}",
            "infinity, NaN": " and ".join([*["infinity"] * e.has_inf, *["NaN"] * e.has_nan]) or "neither",
        }
        for e in ELEMENTS.values()
    ]


GENERATIONS = ("8.0", "8.9", "9.0", "10.0", "12.0", "CPU")


def formats_of(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows of recipes with the formats of their operands alone."""
    return [{key: value for key, value in row.items() if key not in (*GENERATIONS, "because")} for row in rows]


def native(row: dict[str, str]) -> dict[str, str]:
    """The generations on which the GEMMs of a row run natively, and why they are emulated on the others."""
    places = [name for name in GENERATIONS if row[name] == "native"]
    where = "everywhere" if len(places) == len(GENERATIONS) else ", ".join(places) or "nowhere"
    return {"native on": where, "emulated elsewhere, because": row["because"]}


def native_rows(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows of recipes with where they run natively."""
    return [{"recipe": row["recipe"], **native(row)} for row in rows]


def pass_rows() -> list[dict[str, str]]:
    """Every pass of every stage, in order, with the reason for its place and the file that has its code."""
    stages = {name: value for name, value in vars(pipeline).items() if isinstance(value, tuple) and name.isupper()}
    return [
        {"stage": name, "pass": f"`{step.name}`", "stands there because": step.because}
        for name, stage in stages.items()
        for step in stage
        if isinstance(step, Pass) and (step not in pipeline.CAPTURED or name == "CAPTURED")
    ]


RANGES = {
    "per_tensor_e4m3": "current_scaling",
    "per_tensor_e5m2": "current_scaling, gradients",
    "per_tensor_e4m3(pow2)": "with use_power_2_scales",
    "per_tensor_e5m2(pow2)": "the same, gradients",
    "per_row_e4m3(pow2,torchao)": "rowwise",
    "block_1x128_e4m3(pow2)": "float8_blockwise",
    "block_1x128_e4m3": "with use_f32_scales",
    "mxfp8_e4m3": "mxfp8",
    "mxfp8_e5m2": "with Format.HYBRID, gradients",
    "mxfp8_e4m3(mode=floor)": "with torchao's rounding down",
    "nvfp4": "nvfp4",
    "nvfp4(four_over_six=mae,e4m3_max=256)": "with nvfp4_4over6",
}
"""Formats with the recipes that quantize by them."""


def range_of(spec: QuantSpec) -> tuple[float, float]:
    """The largest float32 that stays finite when a tensor has nothing else but zeros, and the largest that is zero."""

    def value(bits: int) -> torch.Tensor:
        return torch.tensor(bits, dtype=torch.int32).view(torch.float32)

    def becomes(bits: int) -> torch.Tensor:
        x = torch.zeros(1, 128)
        x[0, 0] = value(bits)
        return reference.dequantize(reference.quantize(x, spec), spec)[0, 0]

    codes = range(0x7F800000)
    first = bisect.bisect_left(codes, True, key=lambda bits: not becomes(bits).isfinite())
    least = bisect.bisect_left(codes, True, key=lambda bits: bool(becomes(bits) != 0))
    return value(first - 1).item(), value(least - 1).item()


def range_rows() -> list[dict[str, str]]:
    """Formats with the magnitudes that they keep."""
    rows = []
    for text, recipe in RANGES.items():
        largest, least = range_of(QuantSpec.parse(text))
        whole = largest == torch.finfo(torch.float32).max
        rows.append({
            "format": f"`{text}`", "recipe": recipe, "finite up to": "all" if whole else f"{largest:.4g}",
            "zero up to": f"{least:.2g}",
        })  # fmt: skip
    return rows


MESHES = {"8": Mesh(8), "64": Mesh(64), "64 = 8 x 8": Mesh(8, 8), "1024 = 128 x 8": Mesh(128, 8)}

GATHERS = (
    ("bfloat16", None, None),
    ("current_scaling", "per_tensor_e4m3", "per_tensor_e4m3"),
    ("mxfp8", "mxfp8_e4m3", "mxfp8_e4m3"),
    ("nvfp4", "nvfp4_2d", "nvfp4"),
)


def traffic_rows() -> list[dict[str, str]]:
    """Returns what a rank of a mesh receives in a step and holds, for two models and some formats of their gathers."""
    rows = []
    for model, sizes in DECODERS.items():
        for ranks, mesh in MESHES.items():
            for name, weights, activations in GATHERS:
                moved = traffic(sizes, mesh, 8192, weights, activations)
                tensor_parallel = f"{moved.activations / 1e9:.2f}" if mesh.tensor > 1 else ""
                rows.append(
                    {
                        "model": model,
                        "ranks": ranks,
                        "gathers": name,
                        "weights": f"{moved.weights / 1e9:.2f}",
                        "gradients": f"{moved.gradients / 1e9:.2f}",
                        "activations": tensor_parallel,
                        "memory": f"{state_bytes(sizes, mesh, weights) / 1e9:.1f}",
                    }
                )
    return rows


STORED = ("current_scaling", "rowwise", "float8_blockwise", "mxfp8", "nvfp4", "weight_only_fp8", "weight_only_nvfp4")


def stored_rows() -> list[dict[str, str]]:
    """The bytes of a parameter of a large linear layer that `quantize_parameters` stores, besides its master."""
    rows = []
    for recipe in STORED:
        sizes = []
        for training in (True, False):
            with torch.device("meta"):
                layer = torch.nn.Linear(4096, 4096).train(training)
            fxquant.quantize_parameters(layer, recipe)
            parts = [part for direction in Direction for part in layer.weight.parts(direction)]
            sizes.append(sum(part.numel() * part.itemsize for part in parts) / layer.weight.numel())
        rows.append({"recipe": recipe, "for training": f"{sizes[0]:.3f}", "in evaluation mode": f"{sizes[1]:.3f}"})
    return rows


def command_rows() -> list[dict[str, str]]:
    """Every command with its arguments and options."""
    rows = []
    for name, command in command_line.commands().items():
        if name == "bench":  # has a table of its own
            continue
        rows.append({"command": f"**{name}**", "argument": "", "meaning": command.description or ""})
        for action in command._actions:
            if not isinstance(action, argparse._HelpAction):
                text = ", ".join(action.option_strings) or str(action.metavar)
                value = f" {action.metavar}" if action.option_strings and action.metavar else ""
                rows.append({"command": "", "argument": f"`{text}{value}`", "meaning": str(action.help)})
    return rows


def benchmark_rows() -> list[dict[str, str]]:
    """Every benchmark with what it times."""
    return [{"benchmark": f"`{name}`", "times": benchmark.help} for name, benchmark in BENCHMARKS.items()]


def package_page() -> str:
    """README.md for package indexes, where links to files of this repository lead nowhere."""
    text = re.sub(r"^!\[[^\]]*\]\([^)]*\)\n\n", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M)
    text = re.sub(r"<!--.*?-->\n", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    return re.sub(r"^## Go on\n.*\Z", "Apache-2.0.\n", text, flags=re.M | re.S)


TABLES: dict[str, Callable[[], str]] = {
    "commands": lambda: markdown(command_rows()),
    "benchmarks": lambda: markdown(benchmark_rows()),
    "recipes": lambda: markdown(formats_of(recipe_rows())),
    "recipes-native": lambda: markdown(native_rows(recipe_rows())),
    "factories": lambda: markdown(formats_of(factory_rows())),
    "factories-native": lambda: markdown(native_rows(factory_rows())),
    "te-invariants": lambda: markdown(invariant_rows()),
    "recipe-settings": recipe_settings,
    "formats": lambda: markdown([formats_of([row])[0] | native(row) for row in format_rows()]),
    "elements": lambda: markdown(element_rows()),
    "skip-reasons": lambda: markdown(
        [{"reason": f"`{r}`", "meaning": r.meaning, "what to do": r.remedy} for r in SkipReason]
    ),
    "ranges": lambda: markdown(range_rows()),
    "passes": lambda: markdown(pass_rows()),
    "stored": lambda: markdown(stored_rows()),
    "traffic": lambda: markdown(traffic_rows()),
    "example": lambda: f"```text\n{run_example(examples(ROOT / 'README.md')[0])}```\n",
    "start": lambda: f"```text\n{run_example(examples(ROOT / 'docs' / 'start.md')[0])}```\n",
}


def render(text: str) -> str:
    """The text with every marked part made anew."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def pages() -> list[Path]:
    """The files that may have generated parts or examples."""
    return [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "package.md")]


def drawn() -> dict[Path, Callable[[], str]]:
    """Every file that is made from code as a whole, with what makes it."""
    pictures = {f"pictures/{name}.svg": draw for name, draw in load(ROOT / "docs" / "charts.py").PICTURES.items()}
    whole = {"pipeline.svg": load(ROOT / "docs" / "picture.py").draw, "package.md": package_page, **pictures}
    return {ROOT / "docs" / name: draw for name, draw in whole.items()}


def contents() -> dict[Path, str]:
    """Every file that is made from code, whole or in parts, with what it should hold."""
    parts = {page: render(page.read_text(encoding="utf-8")) for page in pages()}
    return parts | {path: draw() for path, draw in drawn().items()}


if __name__ == "__main__":
    for path, text in contents().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"updated {path.relative_to(ROOT)}")
