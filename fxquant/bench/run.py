"""Benchmarks: training steps of Llama blocks, of a whole model, and single layers, beside bf16 Inductor and torchao.

    python -m fxquant bench block | model | linear | grouped | decode | generate | attention | export | cast | probe |
                             sharded [--providers NAME,NAME] ...

A step is a forward and a backward of bfloat16 weights on random data, without an optimizer (`model` has float32 weights
and an optimizer), compiled with static shapes and without Inductor's caches. Providers are timed in turn, round after
round; times are medians after a second of warm-up, from CUDA events. Decoding, exported blocks and attention are timed
in CUDA graphs. The modules of the benchmarks say more. Each finished row is appended to the CSV file. On the CPU the
sizes are tiny and the numbers mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import functools
import importlib.metadata
import math
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fxquant.bench import attention, casts, decode, export, generate, linear, model, probing, ranks, sharded, training
from fxquant.bench.providers import (
    ATTENTION,
    CACHED,
    LEAST,
    PROVIDERS,
    QUANTIZED,
    TORCHAO,
    WITH_ATTENTION,
    WITHOUT_ATTENTION,
    installed,
)
from fxquant.bench.rounds import ROUNDS, Row, Turns, measure
from fxquant.errors import OptionError
from fxquant.files import check_place
from fxquant.report.text import aligned
from fxquant.tools.arguments import number
from fxquant.tools.console import printed
from fxquant.tools.progress import progress

COLUMNS = (
    "benchmark", "size", "provider", "ms", "ms_20", "ms_80", "us", "over_bf16", "over_torchao", "of_floor", "floor_ms",
    "over_read", "of_copy", "probe_cost", "tokens_s", "saved_gib", "peak_gib", "weights_gib", "loss_diff",
    "gather_bytes", "wire_gib", "gather_ms", "gathers_ms", "gathers_hidden", "wire_ms", "wire_hidden", "compile_s",
    "flops_quantized", "gemms", "card", "torch", "triton", "torchao", "date", "command",
)  # fmt: skip
SHOWN = {
    "size": "size", "provider": "what", "ms": "step ms", "us": "us", "over_bf16": "over bf16",
    "over_torchao": "over torchao", "of_floor": "of floor", "over_read": "over reading the weight",
    "of_copy": "of copy rate", "probe_cost": "cost of the probe", "tokens_s": "tokens/s",
    "saved_gib": "saved GiB", "peak_gib": "peak GiB", "weights_gib": "weights GiB",
    "loss_diff": "losses differ by", "gather_bytes": "gathered bytes an element", "wire_gib": "received GiB",
    "gather_ms": "one gather ms", "gathers_ms": "gathers ms", "gathers_hidden": "hidden",
    "wire_ms": "collectives ms", "wire_hidden": "of them hidden",
    "compile_s": "compile s", "flops_quantized": "FLOPs quantized", "gemms": "GEMMs",
}  # fmt: skip
"""The columns that tables show, and their titles."""


@dataclass(frozen=True)
class Benchmark:
    """A kind of benchmark: its sizes on CUDA and on the CPU, the providers run by default, and all that it can run."""

    help: str
    sizes: Sequence[Any]
    tiny: Sequence[Any]
    default: Sequence[str]
    providers: Sequence[str] = tuple(installed(WITHOUT_ATTENTION))


def _of(module: Any, help: str) -> Benchmark:
    """The benchmark of a module, whose providers all run by default."""
    return Benchmark(help, module.SIZES, module.TINY, module.PROVIDERS, module.PROVIDERS)


BENCHMARKS = {
    "block": Benchmark(
        f"training steps of Llama3-8B blocks; those of RECIPE{ATTENTION} quantize attention too",
        (training.LLAMA3_8B,),
        (training.TINY_STACK,),
        ("bf16", *QUANTIZED, LEAST[0], *TORCHAO, WITH_ATTENTION[0]),
    ),
    "model": Benchmark(
        "training steps of a Hugging Face Llama of 1.1 B, float32 parameters under autocast, AdamW included",
        (model.LLAMA,),
        (model.TINY,),
        ("bf16", *QUANTIZED, LEAST[0], *TORCHAO),
    ),
    "linear": Benchmark(
        "forward and backward of one linear layer",
        linear.SIZES,
        linear.TINY,
        ("bf16", *(name for name in QUANTIZED if name not in ("mxfp8", "nvfp4")), *TORCHAO),
    ),
    "grouped": Benchmark(
        "forward and backward of the experts of one layer",
        training.GROUPS,
        (training.TINY_GROUPS,),
        ("bf16", *QUANTIZED, *CACHED, "torchao rowwise"),
    ),
    "decode": _of(decode, "inference of one linear layer with few tokens"),
    "generate": _of(generate, "`generate` of a Hugging Face Llama with a static cache, in CUDA graphs"),
    "export": _of(export, "inference of a decoder block compiled ahead of time"),
    "attention": _of(attention, "attention in FP8, forward and backward"),
    "cast": _of(casts, "quantizations, beside a copy"),
    "probe": _of(probing, "training steps of Llama3-8B blocks with a probe that measures all, one in ten or none"),
    "sharded": Benchmark(
        "training steps of blocks under FSDP2 and tensor parallelism, a rank for each GPU",
        sharded.SIZES,
        sharded.TINY,
        sharded.DEFAULT,
        sharded.PROVIDERS,
    ),
}


_ON_CUDA = {
    "length": training.LLAMA3_8B.length, "blocks": training.LLAMA3_8B.blocks, "repeats": 30, "seconds": 1.0
}  # fmt: skip
"""The defaults of options that have an effect on CUDA alone."""


def run_benchmark(options: argparse.Namespace, command: str) -> list[Row]:
    """Measures every size and provider; the row of a provider that fails has the reason in its last shown column."""
    benchmark, cuda = BENCHMARKS[options.benchmark], options.device == "cuda"
    turns = Turns(options.device, options.seconds if cuda else 0.0, options.repeats if cuda else ROUNDS)
    sizes = benchmark.sizes if cuda else benchmark.tiny
    if options.benchmark == "sharded":
        turns = ranks.TurnsOfRanks(turns.device, turns.seconds, turns.repeats, time.monotonic() + options.within)
        sizes = sharded.chosen(sizes, options.parts, options.length if cuda else None, options.blocks if cuda else None)
    if cuda and options.benchmark == "block":
        sizes = [replace(size, length=options.length, blocks=options.blocks) for size in sizes]
    if not cuda and (ignored := _only_on_cuda(options)):
        print(f"fxquant: note: {ignored} without effect: on the CPU sizes are tiny and fixed", file=sys.stderr)
    where = setting(options.device, command)
    rows = []
    for size in sizes:
        shown = progress("bench", functools.partial("compiling and timing {} {}".format, options.benchmark, size))
        with shown if ranks.is_first() else contextlib.nullcontext():
            measured = measure(options.providers, size, turns)
        for row in measured:
            row = dict.fromkeys(COLUMNS, "") | {"benchmark": options.benchmark, "size": str(size)} | row | where
            rows.append(row)
            if ranks.is_first():
                print(" ".join(filter(None, (row[column] for column in SHOWN))), file=sys.stderr, flush=True)
                if options.csv:
                    append(options.csv, row)
    return rows


def _only_on_cuda(options: argparse.Namespace) -> str:
    """The options that were given and have an effect on CUDA alone."""
    changed = (name for name, default in _ON_CUDA.items() if getattr(options, name, default) != default)
    return ", ".join(f"--{name}" for name in changed)


def setting(device: str, command: str) -> Row:
    """The columns of place and time: card, versions, date and command."""
    return {
        "card": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "torchao": _version("torchao"),
        "date": datetime.date.today().isoformat(),
        "command": command,
    }


def _version(package: str) -> str:
    """The version of an installed package; empty for none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def append(path: Path, row: Row) -> None:
    """Adds a row to a CSV file, with a header where the file is new."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)


def check_csv(path: Path) -> None:
    """Raises OptionError for a file that is not one of `append` with today's columns, which rows would spoil."""
    check_place(path)
    if path.exists() and path.stat().st_size:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            if next(csv.reader(file), []) != list(COLUMNS):
                raise OptionError(
                    f"{path} is no CSV file of this benchmark's columns, and stays as it is: choose another"
                )


def table_rows(rows: Iterable[Row]) -> list[Row]:
    """The shown columns of rows, by title; columns in which nothing was measured are left out."""
    rows = list(rows)
    columns = [column for column in SHOWN if any(row[column] for row in rows)]
    return [{SHOWN[column]: row[column] for column in columns} for row in rows]


def _providers(text: str) -> list[str]:
    names = re.split(r",(?![^(]*\))", text)  # a spec has commas of its own, in parentheses
    allowed = dict.fromkeys(
        (*PROVIDERS, *decode.PROVIDERS, *attention.PROVIDERS, *casts.PROVIDERS, *probing.PROVIDERS, *sharded.PROVIDERS)
    )
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {unknown}; known: {', '.join(allowed)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fxquant bench", description="Times fxquant, bf16 and torchao.")
    kinds = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        kind = kinds.add_parser(name, help=benchmark.help)
        if name in ("block", "sharded"):
            tokens, blocks = "tokens in a sequence (default: %(default)s)", "decoder blocks (default: %(default)s)"
            kind.add_argument("--length", type=number(int, 1), default=_ON_CUDA["length"], help=tokens)
            kind.add_argument("--blocks", type=number(int, 1), default=_ON_CUDA["blocks"], help=blocks)
        if name == "sharded":
            _add_ranks(kind)
        kind.set_defaults(providers=installed(benchmark.default))
        names = ", ".join(benchmark.providers)
        kind.add_argument("--providers", type=_providers, help=f"names, separated by commas, of {names}")
        kind.add_argument("--csv", type=Path, help="append the rows to this file")
        kind.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
        timed, warm_up = "timed steps on CUDA (default: %(default)s)", "warm-up on CUDA (default: %(default)s)"
        kind.add_argument("--repeats", type=number(int, 1), default=_ON_CUDA["repeats"], help=timed)
        kind.add_argument("--seconds", type=number(float, 0), default=_ON_CUDA["seconds"], help=warm_up)
    return parser


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the benchmark that runs on several ranks."""
    gpus = torch.cuda.device_count()
    parser.add_argument(
        "--ranks", type=number(int, 1), default=gpus or 2, help="processes, where torchrun has started none"
    )
    parser.add_argument(
        "--parts", type=_parts, default=sharded.PARTS, help=f"names, separated by commas, of {', '.join(sharded.PARTS)}"
    )
    parser.add_argument(
        "--within", type=number(float, 0), default=math.inf, help="seconds after which nothing more is compiled"
    )


def _parts(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in sharded.PARTS]:
        raise argparse.ArgumentTypeError(f"unknown {unknown}; known: {', '.join(sharded.PARTS)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark, prints its table and returns an exit code: 1 when a provider failed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("torch finds no CUDA device: --device cpu runs tiny sizes, whose times mean nothing")
    if options.csv:
        check_csv(options.csv)
    command = f"python -m fxquant bench {' '.join(argv)}".partition(" --csv ")[0]
    if options.benchmark != "sharded":
        return _shown(run_benchmark(options, command), options.benchmark)
    if (code := ranks.start(argv, options.ranks)) is not None:
        return code
    with ranks.group(options.device):
        rows = run_benchmark(options, command)
        return _shown(rows, options.benchmark) if ranks.is_first() else 0


def _shown(rows: Sequence[Row], benchmark: str) -> int:
    """Prints a table and returns the exit code."""
    shown = table_rows(rows)
    text = aligned([list(shown[0]), *(list(row.values()) for row in shown)])
    ratios = {column: SHOWN[column] for column in ("over_bf16", "over_torchao", "of_floor")}
    if benchmark == "linear" and (table := linear.means(rows, ratios)):
        text += f"\n\n{aligned(table)}"
    return printed(text) or int(any(not (row["ms"] or row["us"] or row["loss_diff"]) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
