"""The command line: ``fxquant``, or ``python -m fxquant``, ``explain | measure | quantize | formats | recipes | ...``.

Tables go to stdout; errors, notes and progress as lines to stderr, and what the user's own code prints. The exit code
is 0 for success, 1 for a failure, where nothing is quantized, or where `diff --exit-code` finds a difference, 2 for
wrong usage, 130 where it was interrupted. No input is ever overwritten.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch

import fxquant
from fxquant import factories, recipes
from fxquant.checks import article, did_you_mean
from fxquant.cost.kept import find_card
from fxquant.errors import FxQuantError, FxQuantWarning
from fxquant.files import check_outputs
from fxquant.formats import FORMATS
from fxquant.recipes import places
from fxquant.report.data import plain_spec
from fxquant.report.json import SCHEMA
from fxquant.report.text import aligned
from fxquant.tools.arguments import number, path, regex
from fxquant.tools.console import printed
from fxquant.tools.target import attribute, load, one_sentence, origin, sources, target


def format_rows() -> list[dict[str, str]]:
    """One row per format, as text."""
    return [
        {
            "format": row.name,
            "element": row.element.name if row.element else "-",
            "one scale for": _block_text(row.block) if row.element else "-",
            "scale": str(row.scale_dtype).removeprefix("torch.") if row.scale_dtype else "-",
            "bits/element": f"{8 * row.bytes_per_element:g}" if row.element else "-",
            **places.format_columns(row),
        }
        for row in FORMATS.values()
    ]


def recipe_rows() -> list[dict[str, str]]:
    """One row per named recipe, as text: the format of each operand of a linear, and the ways its GEMMs run."""
    return [_row(name, recipe) for name, recipe in recipes.RECIPES.items()]


def factory_rows() -> list[dict[str, str]]:
    """The rows of `recipe_rows` for the factories of the library and of papers."""
    library = [*factories.FACTORIES.items(), *factories.PAPERS.items()]
    return [_row(f"factories.{name}", recipes.CustomRecipe(qfactory=factory)) for name, factory in library]


def _row(name: str, recipe: recipes.Recipe) -> dict[str, str]:
    specs = {operand: plain_spec(str(q.operand_spec())) for operand, q in recipes.of_operands(recipe).items()}
    return {"recipe": name, **specs, **places.recipe_columns(recipe)}


def environment() -> dict[str, Any]:
    """Versions, the device, and the way each recipe runs on it."""
    content: dict[str, Any] = {"fxquant": fxquant.__version__, "python": platform.python_version()}
    content["torch"] = torch.__version__
    try:
        content["triton"] = importlib.import_module("triton").__version__
    except ImportError:
        content["triton"] = "not installed"
    capability, content["device"] = (0, 0), "cpu"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        content |= {"device": torch.cuda.get_device_name(), "capability": "sm{}{}".format(*capability)}
    content["recipes"] = {name: places.runs_as(recipe, capability) for name, recipe in recipes.RECIPES.items()}
    content["generations"] = {name: places.recipe_columns(recipe) for name, recipe in recipes.RECIPES.items()}
    return content


def _note(text: str) -> None:
    print(f"fxquant: note: {text}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if _program() == "fxquant" and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, "")  # the user's folder, which `python -m` has there
    try:
        if arguments[:1] == ["bench"]:
            from fxquant.bench import run as bench

            return bench.main(arguments[1:])
        options = _parser().parse_args(arguments)
        with redirect_stdout(sys.stderr):  # what the user's own code prints is no part of a table, or of JSON
            text = options.run(options)
    except KeyboardInterrupt:
        print("fxquant: interrupted", file=sys.stderr)
        return 130
    except FxQuantError as error:
        print(f"fxquant: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return printed(text) or getattr(options, "code", 0)


def _program() -> str:
    return "fxquant" if os.path.basename(sys.argv[0]) in ("fxquant", "fxquant.exe") else "python -m fxquant"


def commands() -> dict[str, argparse.ArgumentParser]:
    """Returns the parser of every command by its name."""
    return next(a.choices for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))


def _parser() -> argparse.ArgumentParser:
    from fxquant.tools import compare

    parser = argparse.ArgumentParser(prog=_program(), description="Shows what fxquant does, and why.")
    parser.add_argument("--version", action="version", version=f"fxquant {fxquant.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    recipe: Any = {
        "default": "mxfp8",
        "metavar": "RECIPE",
        "help": "one of those that the command recipes lists, or MODULE:OBJECT, a recipe or factory (default: mxfp8)",
    }

    command = partial(_command, commands)
    explain = command(
        _explain, "explain", "what becomes of every matmul of a model",
        "Captures a model, applies a recipe and prints what becomes of its matmuls, folded or with --full.",
        "my_models:make --recipe mxfp8 --layer mlp --html report.html",
    )  # fmt: skip
    _add_target(explain, recipe)
    _add_views(explain)
    explain.add_argument(
        "--stage",
        metavar="NAME",
        nargs="?",
        const="",
        help="print the graphs after this pass or stage instead, with marks of what it changed, such as find or joint; "
        "without a name the list of all; --layer chooses nodes",
    )

    report = command(
        _report, "report", "a report that was saved, as text or a page",
        "Prints a report that explain --json or Report.save wrote, or writes its page.", "report.json -o report.html",
    )  # fmt: skip
    report.add_argument("report", metavar="REPORT.json", help="the report as JSON")
    report.add_argument("-o", "--html", metavar="PATH", type=path, help="write the page there instead of printing")
    report.add_argument("--layer", metavar="REGEX", type=regex, default="", help="only layers whose name it finds")
    _add_views(report)

    diff = command(
        compare.run, "diff", "what changed between two saved reports",
        "Compares two reports: layers whose decision, kernel, time, bytes or error changed.",
        "yesterday.json today.json -o diff.html",
    )  # fmt: skip
    diff.add_argument("a", metavar="A.json", help="a report as JSON")
    diff.add_argument("b", metavar="B.json", help="another one")
    diff.add_argument("-o", "--html", metavar="PATH", type=path, help="also write the comparison as a page")
    diff.add_argument("--exit-code", action="store_true", help="end with 1 if anything differs, as git diff does")

    _add_runs(command, recipe)

    rates = command(
        _rates, "rates", "measures this card for estimates, and keeps what it found",
        "Measures GEMMs, casts, attention and copies of the GPU at hand in less than 90 s, and keeps their rates in "
        "the user's cache folder, where explain, auto recipes and estimates find them.",
    )  # fmt: skip
    rates.add_argument(
        "--seconds", type=number(float, 0), default=75.0, help="begin no probe after this time (default: 75)"
    )
    rates.add_argument("--dry-run", action="store_true", help="print the rates and keep none")

    for run, name, text in (
        (_formats, "formats", "every number format and its scaling"),
        (_recipes, "recipes", "recipes and factories, and where they run natively"),
        (_env, "env", "versions, the device, and how each recipe runs on it"),
    ):
        command(run, name, text, f"Prints {text}.")
    for subparser in commands.choices.values():
        subparser.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser("bench", help="times steps and linear layers beside bf16 and torchao (bench --help)")
    return parser


def _command(
    commands: Any, run: Callable[[argparse.Namespace], str], name: str, summary: str, description: str,
    example: str = "",
) -> argparse.ArgumentParser:  # fmt: skip
    """Adds a command that `run` answers; its arguments are added to what is returned."""
    epilog = f"example: {name} {example}" if example else None
    command = commands.add_parser(name, help=summary, description=description, epilog=epilog)
    command.set_defaults(run=run)
    return command  # type: ignore[no-any-return]


def _add_runs(command: Callable[..., argparse.ArgumentParser], recipe: dict[str, Any]) -> None:
    """Adds the commands that run a model, and that which writes a program."""
    measure = command(
        _measure, "measure", "the errors of a model's quantized products",
        "Runs a model once, and prints the error of every quantized product and what became zero.",
        "my_models:make --recipe nvfp4 --json",
    )  # fmt: skip
    _add_target(measure, recipe)

    bisect = command(
        _bisect, "bisect", "the operands whose quantization breaks a check",
        "Runs a model under parts of a recipe, and prints the fewest operands that break a check.",
        "my_models:make --recipe nvfp4 --check differs=0.2",
    )  # fmt: skip
    _add_target(bisect, recipe, shown=False)
    bisect.add_argument(
        "--check",
        metavar="CHECK",
        default="nan",
        help="nan, loss=BOUND, differs=BOUND, or MODULE:FUNCTION of the compiled model and its batch (default: nan)",
    )

    quantize = command(
        _quantize, "quantize", "quantizes a saved exported program",
        "Quantizes a program saved by torch.export.save and saves the result, as a whole or not at all.",
    )  # fmt: skip
    quantize.add_argument("program", metavar="PROGRAM.pt2", help="the file of torch.export.save")
    quantize.add_argument("--recipe", **recipe)
    quantize.add_argument("-o", "--output", metavar="PATH", type=path, required=True, help="where the result goes")
    quantize.add_argument(
        "--calibrate",
        metavar="DATA.pt",
        type=path,
        help="a list of inputs, saved by torch.save, for static activation scales",
    )
    quantize.add_argument("--report", metavar="PATH", type=path, help="also write an HTML report")


def _add_target(command: argparse.ArgumentParser, recipe: dict[str, Any], shown: bool = True) -> None:
    """Adds the arguments of commands that take a model of the user's, and of those that show a report of it."""
    command.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        type=target,
        help="a function without arguments that returns (model, args), (model, kwargs) or (model, args, kwargs)",
    )
    command.add_argument("--recipe", **recipe)
    if not shown:
        return
    command.add_argument("--layer", metavar="REGEX", type=regex, default="", help="only layers whose name it finds")
    command.add_argument("--html", metavar="PATH", type=path, help="also write an HTML report, of all layers")


def _add_views(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that choose what is shown of a report."""
    command.add_argument("--full", action="store_true", help="print every operand and kernel instead of an overview")
    command.add_argument("--collapse", action="store_true", help="fold layers that differ only in a number")
    command.add_argument(
        "--card", metavar="NAME", help="tell kernels and times of this card, such as H100, instead of here"
    )
    command.add_argument("--graphs", action="store_true", help="print the rewritten graphs too")


def _recipe(name: str) -> recipes.Recipe:
    if wrapped := re.fullmatch(r"auto\((.*)\)", name):
        return recipes.auto(_recipe(wrapped[1]))
    if re.fullmatch(r"[\w.]+:\w+", name):
        return _own_recipe(name, attribute(name))
    kind, _, factory = name.rpartition(".")
    if kind != "factories":
        return recipes.get(name)
    by_name = {**factories.FACTORIES, **factories.PAPERS}
    if factory not in by_name:
        hint = did_you_mean(name, [f"factories.{item}" for item in by_name])
        raise FxQuantError(f"unknown factory {factory!r}{hint or ';'} known factories: {', '.join(by_name)}")
    return recipes.CustomRecipe(qfactory=by_name[factory])


def _own_recipe(name: str, answer: Any) -> recipes.Recipe:
    """The recipe that an object of the user's is, names, or as a factory makes."""
    if isinstance(answer, recipes.Recipe | str):
        return recipes.resolve(answer)
    if answer is None:
        raise FxQuantError(f"{origin(name)} has no object {name.partition(':')[2]!r}")
    if not callable(answer):
        raise FxQuantError(
            f"{name} is {article(type(answer).__name__)}: a recipe or a factory of quantizers is expected"
        )
    return recipes.CustomRecipe(qfactory=answer)


def _explain(options: argparse.Namespace) -> str:
    from fxquant.passes.pipeline import stage_names
    from fxquant.tools.explain import explain

    def run(model: Any, recipe: recipes.Recipe, *args: Any, **kwargs: Any) -> Any:
        report = explain(model, recipe, *args, stages=options.stage is not None, **kwargs)
        return report if options.card is None else report.on(options.card)

    if options.card is not None:
        find_card(options.card)
    if options.stage and options.stage.lower() not in (names := stage_names()):
        hint = did_you_mean(options.stage, names)
        raise FxQuantError(
            f"unknown stage {options.stage!r}{hint or ';'} --stage without a name lists those of a model"
        )
    if options.stage is None:
        return _shown(_reported(options, run), options)
    if without_effect := [name for name in ("full", "collapse", "graphs", "card") if getattr(options, name)]:
        _note(f"--stage prints graphs: --{', --'.join(without_effect)} has no effect")
    text: str = _reported(options, run).stage(options.stage, layer=options.layer)
    return _json({"stage": options.stage, "text": text}) if options.json else text


def _report(options: argparse.Namespace) -> str:
    from fxquant.report.report import Report

    check_outputs([options.html] if options.html else [], [options.report])
    if options.card is not None:
        find_card(options.card)
    report = Report.load(options.report)
    report = report if options.card is None else report.on(options.card)
    if options.layer and report.decisions and not report.layers(options.layer):
        _note(f"--layer {options.layer!r} has no effect: it is found in no layer's name")
    if not options.html:
        return _shown(report, options)
    without_effect = [name for name in ("layer", "full", "collapse", "graphs", "json") if getattr(options, name)]
    if without_effect:
        _note(f"a page has all of a report: --{', --'.join(without_effect)} has no effect")
    report.to_html(options.html)
    return f"{options.html}: {report.totals()}"


def _shown(report: Any, options: argparse.Namespace) -> str:
    """A report as the options ask for it."""
    if options.full and (options.json or options.layer or options.collapse):
        _note("--full has no effect: with --json, --layer or --collapse every operand is there")
    if options.json:
        return str(report.to_json(options.layer, collapse=options.collapse, graphs=options.graphs))
    text: str = report.text(options.layer, collapse=options.collapse, full=options.full)
    if options.graphs:
        text += "".join(f"\n\n{name} graph\n{graph}" for name, graph in report.graphs.items())
    return text


def _rates(options: argparse.Namespace) -> str:
    from fxquant.bench.rates import command

    return command(options.seconds, dry=options.dry_run, json=options.json)


def _measure(options: argparse.Namespace) -> str:
    from fxquant.tools.measure import measure
    from fxquant.tools.progress import progress

    with progress("measure", lambda: "products run one by one, with and without quantization"):
        report = _reported(options, measure)
    if not report.losses:
        raise FxQuantError(f"nothing was quantized, so nothing is measured: {report.totals()}")
    if options.json:
        return str(report.to_json(options.layer, graphs=False))
    return "\n".join([f"recipe: {report.recipe}", report.loss_table(options.layer), report.totals()])


def _bisect(options: argparse.Namespace) -> str:
    from fxquant.tools.bisect import CHECKS, bisect
    from fxquant.tools.trials import Batch

    recipe, check = _recipe(options.recipe), options.check
    if bound := re.fullmatch(rf"({'|'.join(CHECKS[1:])})=(-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)", check):
        check = {bound[1]: float(bound[2])}
    elif ":" in check and not callable(check := attribute(check)):
        raise FxQuantError(f"{options.check} is no function: a check is one of (model, batch)")
    model, args, kwargs = load(options.target)
    with one_sentence(f"{options.target} under the check {options.check}"):
        operands = bisect(model, Batch(args, kwargs), recipe, check)
    rows = [operand._asdict() for operand in operands]
    if options.json:
        return _json({"recipe": str(recipe), "operands": rows})
    if not rows:
        return f"the check holds under {recipe}"
    return _rows("operands", [{**row, "layer": row["layer"] or "<model>"} for row in rows], False)


def _reported(options: argparse.Namespace, run: Callable[..., Any]) -> Any:
    """The report that a tool makes of the user's model, written as a page too where one is asked for."""
    from fxquant.tools.progress import progress

    recipe, outputs = _recipe(options.recipe), [options.html] if options.html else []
    attribute(options.target)
    check_outputs(outputs, sources(options.target, options.recipe))
    with progress(options.target, lambda: "making the model"):
        model, args, kwargs = load(options.target)
    with one_sentence(options.target):
        report = run(model, recipe, *args, **kwargs)
    if options.html:
        report.to_html(options.html)
    if options.layer and report.decisions and not report.layers(options.layer):
        _note(f"--layer {options.layer!r} has no effect: it is found in no layer's name")
    return report


def _quantize(options: argparse.Namespace) -> str:
    from fxquant.export.files import load_inputs, load_program, save_program
    from fxquant.export.program import quantize_program, report_of
    from fxquant.tools.progress import progress

    recipe, work = _recipe(options.recipe), "loading"
    inputs = [options.program, *filter(None, [options.calibrate]), *sources(options.recipe)]
    check_outputs(list(filter(None, (options.output, options.report))), inputs)
    with progress("quantize", lambda: work):
        source = load_program(options.program)
        calibration = load_inputs(options.calibrate) if options.calibrate else None
        work = "quantizing"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "calibration has no effect", FxQuantWarning)  # noted below
            program = quantize_program(source, recipe, calibration=calibration)
        report = report_of(program)
        if not report.summary()["quantized_operands"]:
            raise FxQuantError(f"nothing was quantized, so nothing is written: {report.totals()}")
        work = "writing"
        save_program(program, options.output)
        if options.report:
            report.to_html(options.report)
    if options.calibrate and not any("static amax" in decision.detail for decision in report.decisions):
        _note(f"--calibrate has no effect: no activation of {report.recipe} has a scale of the whole tensor")
    if options.json:
        return report.to_json()
    before, after = (sum(t.nbytes for t in ep.state_dict.values()) for ep in (source, program))
    return f"{report.totals()}\n{options.output}: {after} bytes of state instead of {before}"


def _formats(options: argparse.Namespace) -> str:
    return _rows("formats", format_rows(), options.json)


def _recipes(options: argparse.Namespace) -> str:
    return _rows("recipes", recipe_rows() + factory_rows(), options.json)


def _env(options: argparse.Namespace) -> str:
    content = environment()
    if options.json:
        return _json(content)
    ways, everywhere = content.pop("recipes"), content.pop("generations")
    table = [("recipe", "here", *places.PLACES)]
    table += [(name, way, *(everywhere[name][place] for place in places.PLACES)) for name, way in ways.items()]
    return f"{aligned(list(content.items()))}\n\n{aligned(table)}"


def _json(content: dict[str, Any]) -> str:
    """An object with the version of its form, as reports have it."""
    return json.dumps({"schema": SCHEMA, **content}, indent=1)


def _rows(name: str, rows: list[dict[str, str]], as_json: bool) -> str:
    if as_json:
        return _json({name: rows})
    return aligned([list(rows[0]), *(list(row.values()) for row in rows)])


def _block_text(block: tuple[int, int]) -> str:
    rows, columns = ("all" if size == 0 else str(size) for size in block)
    return "tensor" if rows == columns == "all" else "row" if columns == "all" else f"{rows}x{columns}"


if __name__ == "__main__":
    sys.exit(main())
