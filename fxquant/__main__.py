"""The command line: ``python -m fxquant explain | quantize | formats | recipes | env | bench``.

Tables go to stdout, errors as one line to stderr. The exit code is 0 for success, 1 for a failure, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch

import fxquant
from fxquant import factories, recipes
from fxquant.errors import FxQuantError
from fxquant.files import check_place
from fxquant.formats import FORMATS
from fxquant.report.data import plain_spec
from fxquant.report.text import aligned

PLACES = ("Hopper", "the CPU")


def format_rows() -> list[dict[str, str]]:
    """One row per format, as text."""
    return [
        {
            "format": row.name,
            "element": row.element.name if row.element else "-",
            "one scale for": _block_text(row.block) if row.element else "-",
            "scale": str(row.scale_dtype).removeprefix("torch.") if row.scale_dtype else "-",
            "bits/element": f"{8 * row.bytes_per_element:g}" if row.element else "-",
            "on Hopper": row.hopper,
            "on the CPU": row.cpu,
        }
        for row in FORMATS.values()
    ]


def recipe_rows() -> list[dict[str, str]]:
    """One row per named recipe, as text: the format of each operand of a linear, and the ways its GEMMs run."""
    return [_row(name, recipe) for name, recipe in recipes.RECIPES.items()]


def factory_rows() -> list[dict[str, str]]:
    """The rows of `recipe_rows` for the factories of the library."""
    library = factories.FACTORIES.items()
    return [_row(f"factories.{name}", recipes.CustomRecipe(qfactory=factory)) for name, factory in library]


def _row(name: str, recipe: recipes.Recipe) -> dict[str, str]:
    specs = {operand: plain_spec(str(q.operand_spec())) for operand, q in recipes.of_operands(recipe).items()}
    return {"recipe": name, **specs, **{f"on {place}": recipes.runs_as(recipe, place) for place in PLACES}}


def environment() -> dict[str, Any]:
    """Versions, the device, and the way each recipe runs on it."""
    content: dict[str, Any] = {"fxquant": fxquant.__version__, "python": platform.python_version()}
    content["torch"] = torch.__version__
    try:
        content["triton"] = importlib.import_module("triton").__version__
    except ImportError:
        content["triton"] = "not installed"
    place, content["device"] = "the CPU", "cpu"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        content |= {"device": torch.cuda.get_device_name(), "capability": "sm{}{}".format(*capability)}
        place = "Hopper" if capability[0] == 9 else place
    content["recipes"] = {name: recipes.runs_as(recipe, place) for name, recipe in recipes.RECIPES.items()}
    return content


def load(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) from ``package.module:function``.

    The function takes nothing and returns (model, args), (model, kwargs) or (model, args, kwargs). Raises FxQuantError
    for anything else.
    """
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise FxQuantError(f"cannot import {module_name!r}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise FxQuantError(f"{module_name} has no function {attribute!r}")
    match function():
        case (model, tuple() | list() as args) if callable(model):
            return model, tuple(args), {}
        case (model, dict() as kwargs) if callable(model):
            return model, (), kwargs
        case (model, tuple() | list() as args, dict() as kwargs) if callable(model):
            return model, tuple(args), kwargs
    raise FxQuantError(f"{target}() must return (model, args), (model, kwargs) or (model, args, kwargs)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:
        from fxquant.bench import run as bench

        return bench.main(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        print(options.run(options))
    except FxQuantError as error:
        print(f"fxquant: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fxquant", description="Shows what fxquant does, and why.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    recipe: Any = {"default": "mxfp8", "help": "one of those that the command recipes lists (default: mxfp8)"}

    explain = commands.add_parser(
        "explain",
        help="what becomes of every matmul of a model",
        description="Captures a model, applies a recipe and prints a row for every operand of every GEMM.",
    )
    explain.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        type=_target,
        help="a function without arguments that returns (model, args), (model, kwargs) or (model, args, kwargs)",
    )
    explain.add_argument("--recipe", **recipe)
    explain.add_argument("--layer", metavar="REGEX", type=_regex, default="", help="only layers whose name it finds")
    explain.add_argument("--collapse", action="store_true", help="fold layers that differ only in a number")
    explain.add_argument(
        "--card", metavar="NAME", default="", help="tell kernels and times of this card, such as H100, instead of here"
    )
    explain.add_argument("--graphs", action="store_true", help="print the rewritten graphs too")
    explain.add_argument("--html", metavar="PATH", help="also write an HTML report")
    explain.set_defaults(run=_explain)

    quantize = commands.add_parser(
        "quantize",
        help="quantizes a saved exported program",
        description="Quantizes a program saved by torch.export.save and saves the result, as a whole or not at all.",
    )
    quantize.add_argument("program", metavar="PROGRAM.pt2", help="the file of torch.export.save")
    quantize.add_argument("--recipe", **recipe)
    quantize.add_argument("-o", "--output", metavar="PATH", required=True, help="where the result goes")
    quantize.add_argument(
        "--calibrate", metavar="DATA.pt", help="a list of inputs, saved by torch.save, for static activation scales"
    )
    quantize.add_argument("--report", metavar="PATH", help="also write an HTML report")
    quantize.set_defaults(run=_quantize)

    tables = {
        "formats": (_formats, "every number format and its scaling"),
        "recipes": (_recipes, "recipes and factories, and where they run natively"),
        "env": (_env, "versions, the device, and how each recipe runs on it"),
    }
    for name, (run, text) in tables.items():
        commands.add_parser(name, help=text, description=f"Prints {text}.").set_defaults(run=run)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser("bench", help="times steps and linear layers beside bf16 and torchao (bench --help)")
    return parser


def _target(text: str) -> str:
    if not re.fullmatch(r"[\w.]+:\w+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form package.module:function")
    return text


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error
    return text


def _recipe(name: str) -> recipes.Recipe:
    if wrapped := re.fullmatch(r"auto\((.*)\)", name):
        return recipes.auto(_recipe(wrapped[1]))
    kind, _, factory = name.rpartition(".")
    if kind != "factories":
        return recipes.get(name)
    if factory not in factories.FACTORIES:
        close = difflib.get_close_matches(factory, factories.FACTORIES, 1)
        hint = f"did you mean 'factories.{close[0]}'? " if close else ""
        raise FxQuantError(f"unknown factory {factory!r}; {hint}known factories: {', '.join(factories.FACTORIES)}")
    return recipes.CustomRecipe(qfactory=factories.FACTORIES[factory])


def _explain(options: argparse.Namespace) -> str:
    from fxquant.tools.explain import explain

    recipe = _recipe(options.recipe)
    if options.html:
        check_place(options.html)
    model, args, kwargs = load(options.target)
    report = explain(model, recipe, *args, **kwargs)
    if options.card:
        report = report.on(options.card)
    if options.html:
        report.to_html(options.html)
    if options.json:
        return report.to_json()
    text = report.text(options.layer, collapse=options.collapse)
    if options.graphs:
        text += "".join(f"\n\n{name} graph\n{graph}" for name, graph in report.graphs.items())
    return text


def _quantize(options: argparse.Namespace) -> str:
    from fxquant.export.files import load_inputs, load_program, save_program
    from fxquant.export.program import quantize_program, report_of

    recipe = _recipe(options.recipe)
    for path in filter(None, (options.output, options.report)):
        check_place(path)
    if options.report and os.path.realpath(options.report) == os.path.realpath(options.output):
        raise FxQuantError(f"{options.output}: the program and its report need a file each")
    source = load_program(options.program)
    inputs = load_inputs(options.calibrate) if options.calibrate else None
    program = quantize_program(source, recipe, calibration=inputs)
    report = report_of(program)
    save_program(program, options.output)
    if options.report:
        report.to_html(options.report)
    if options.json:
        return report.to_json()
    before, after = (sum(t.nbytes for t in ep.state_dict.values()) for ep in (source, program))
    return f"{report.totals()}\n{options.output}: {after} bytes of state instead of {before}"


def _formats(options: argparse.Namespace) -> str:
    return _rows(format_rows(), options.json)


def _recipes(options: argparse.Namespace) -> str:
    return _rows(recipe_rows() + factory_rows(), options.json)


def _env(options: argparse.Namespace) -> str:
    content = environment()
    if options.json:
        return json.dumps(content, indent=1)
    ways = content.pop("recipes")
    return aligned([*content.items(), ("recipes", ""), *((f"  {name}", way) for name, way in ways.items())])


def _rows(rows: list[dict[str, str]], as_json: bool) -> str:
    if as_json:
        return json.dumps(rows, indent=1)
    return aligned([list(rows[0]), *(list(row.values()) for row in rows)])


def _block_text(block: tuple[int, int]) -> str:
    rows, columns = ("all" if size == 0 else str(size) for size in block)
    return "tensor" if rows == columns == "all" else "row" if columns == "all" else f"{rows}x{columns}"


if __name__ == "__main__":
    sys.exit(main())
