"""The benchmark of several ranks: two gloo processes, traces, and what starts it."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks

from fxquant.bench import parallel, traffic
from fxquant.bench import ranks as bench_ranks
from fxquant.bench import run as bench


def benchmark(arguments: list[str]) -> int:
    parallel.INNER = "aot_eager"
    return bench.main(["sharded", "--device", "cpu", *arguments])


def rows_of(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    with path.open(newline="") as file:
        return {(row["size"].partition(",")[0], row["provider"]): row for row in csv.DictReader(file)}


def test_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Losses are those of one process; half the bytes travel; only the first rank writes."""
    path = tmp_path / "sharded.csv"
    arguments = ["--providers", "bf16,mxfp8 + gather", "--parts", "losses of fsdp,fsdp,tensor"]
    assert ranks.run(benchmark, [*arguments, "--csv", str(path)]) == [0, 0]
    rows = rows_of(path)
    assert len(rows) == 2 + 2 + 1
    assert {rows["losses of fsdp", name]["loss_diff"] for name in ("bf16", "mxfp8 + gather")} == {"0.0e+00"}
    timed = {name: row for (part, name), row in rows.items() if part == "fsdp"}
    assert all(float(row["ms"]) > 0 and float(row["gather_ms"]) > 0 for row in timed.values())
    gathered = {name: float(row["gather_bytes"]) for name, row in timed.items()}
    assert gathered["bf16"] == 2 and 1.03 < gathered["mxfp8 + gather"] < 1.05
    assert timed["bf16"]["flops_quantized"] == "" and float(timed["mxfp8 + gather"]["flops_quantized"].rstrip("%")) > 90
    assert rows["tensor", "bf16"]["size"].startswith("tensor, 2 ranks, 1 blocks")
    assert float(rows["tensor", "bf16"]["wire_gib"]) > 0 and rows["tensor", "bf16"]["gather_bytes"] == ""


def test_what_no_time_is_left_for_is_left_out(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "sharded.csv"
    arguments = ["--providers", "bf16", "--parts", "fsdp,alone", "--within", "0", "--csv", str(path)]
    assert ranks.run(benchmark, arguments)[0] == 1
    assert [row["gemms"] for row in rows_of(path).values()] == 2 * [
        "left out: no time was left to compile it (--within)"
    ]


def kernel(name: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start}


def test_a_trace_says_what_was_sent_and_hidden() -> None:
    def call(name: str, dims: list[Any], types: list[Any]) -> dict[str, Any]:
        return {"ph": "X", "cat": "cpu_op", "name": name, "args": {"Input Dims": dims, "Input type": types}}

    events = [
        {"ph": "M", "name": "process_name"},
        call("aten::mm", [[64, 64], [64, 64]], ["float", "float"]),
        call("c10d::_allgather_base_", [[400], [100], []], ["unsigned char", "unsigned char", ""]),
        call("_c10d_functional::all_gather_into_tensor", [[10, 10], [], []], ["c10::BFloat16", "Scalar", ""]),
        call("c10d::_reduce_scatter_base_", [[100], [400], []], ["float", "float", ""]),
        call("c10d::allreduce_", [[[10], [30]], []], ["TensorList", ""]),
        call("_c10d_functional::wait_tensor", [[400]], ["float"]),
        kernel("ncclDevKernel_AllGather_RING_LL", 0, 1000),
        kernel("ncclDevKernel_ReduceScatter_Sum_f32", 2000, 3000),
        kernel("gemm", 250, 500), kernel("gemm", 400, 700), kernel("cast", 2900, 3500),
    ]  # fmt: skip
    found = traffic.read(events, ranks=4)
    assert found.gathered == 400 + 4 * 200
    assert found.received == pytest.approx(0.75 * (400 + 800 + 1600))
    assert (found.gathers_ms, found.all_ms) == (1.0, 2.0)
    assert (found.gathers_hidden_ms, found.all_hidden_ms) == pytest.approx((0.45, 0.55))


def test_ranks_are_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(subprocess, "call", lambda command: called.append(command) or 7)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert bench_ranks.start(["sharded"], 1) is None
    assert bench_ranks.start(["sharded"], 2) == 7
    assert called[0][:3] == [sys.executable, "-m", "torch.distributed.run"] and "--nproc-per-node=2" in called[0]
    assert called[0][-4:] == ["-m", "fxquant", "bench", "sharded"]
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    assert bench_ranks.start(["sharded"], 2) is None
    assert len(called) == 1
