"""The benchmark's sizes, measurements and tables, on the CPU and without compiling."""

from __future__ import annotations

import contextlib
import csv
import functools
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxquant import Backend
from fxquant.bench import attention as bench_attention
from fxquant.bench import casts, inference, linear, probing, rounds, training
from fxquant.bench import decode as bench_decode
from fxquant.bench import export as bench_export
from fxquant.bench import generate as bench_generate
from fxquant.bench import model as bench_model
from fxquant.bench import run as bench
from fxquant.bench.providers import CACHED, WEIGHT_ONLY, recipe_of
from fxquant.compat.private import inductor_config


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(provider: str, model: nn.Module) -> tuple[Any, Backend | None]:
        if provider == "rowwise":
            raise RuntimeError("no room")
        recipe = recipe_of(provider)
        cached = provider in CACHED
        backend = None if recipe is None else Backend(recipe, inner="aot_eager", cache_weights=cached)
        return (model if backend is None else torch.compile(model, backend=backend)), backend

    monkeypatch.setattr(training, "prepare", prepare)


@pytest.mark.usefixtures("uncompiled")
def test_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "block.csv"
    providers = ["bf16", "mxfp8", "current_scaling + attention"]
    arguments = ["block", "--device", "cpu", "--providers", ",".join(providers), "--csv", str(path)]
    assert bench.main(arguments) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["provider"] for row in rows] == providers
    assert all(float(row["ms"]) > 0 and row["card"] == "cpu" and row["torch"] == torch.__version__ for row in rows)
    assert rows[0]["over_bf16"] == "1.00x" and float(rows[1]["flops_quantized"].rstrip("%")) > 50
    assert float(rows[2]["flops_quantized"].rstrip("%")) > float(rows[1]["flops_quantized"].rstrip("%"))
    assert str(tmp_path) not in path.read_text(), "a published command names no folder of the machine"
    titles = capsys.readouterr().out.splitlines()[0].split("  ")
    assert "step ms" in [title.strip() for title in titles]
    assert {row["command"] for row in rows} == {" ".join(["python -m fxquant bench", *arguments[:-2]])}


@pytest.mark.usefixtures("uncompiled")
def test_model_trains_one_set_of_parameters(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "model.csv"
    assert bench.main(["model", "--device", "cpu", "--providers", "bf16,current_scaling", "--csv", str(path)]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["provider"] for row in rows] == ["bf16", "current_scaling"]
    assert all(float(row["ms"]) > 0 and row["compile_s"] for row in rows)
    assert float(rows[1]["flops_quantized"].rstrip("%")) > 50
    model, optimizer = bench_model._trained(bench_model.TINY, "cpu")
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert len(steps) == 1 and steps.pop() >= 2 * (2 + rounds.ROUNDS), "both providers stepped it"
    assert len(optimizer.state) == len([*model.parameters()])


def test_generate_counts_tokens_of_all_sequences(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def prepare(provider: str, model: nn.Module, cuda: bool) -> Any:
        backend = Backend("rowwise" if provider == "rowwise" else "high_precision", model=model, inner="aot_eager")
        config = transformers.CompileConfig(backend=backend, mode=None, fullgraph=False, dynamic=False)
        config._compile_all_devices = True
        return config

    monkeypatch.setattr(bench_generate, "prepare", prepare)
    path = tmp_path / "generate.csv"
    assert bench.main(["generate", "--device", "cpu", "--providers", "bf16,rowwise", "--csv", str(path)]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["provider"] for row in rows] == ["bf16", "rowwise"]
    assert rows[0]["flops_quantized"] == "0%" and float(rows[1]["flops_quantized"].rstrip("%")) > 50
    (size,) = bench_generate.TINY
    for row in rows:
        assert float(row["tokens_s"]) == pytest.approx(1e3 * size.sequences * size.tokens / float(row["ms"]), rel=0.02)
    assert float(rows[0]["weights_gib"]) >= float(rows[1]["weights_gib"])


@pytest.mark.usefixtures("uncompiled")
def test_a_failure_is_a_row_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["linear", "--device", "cpu", "--providers", "bf16,rowwise"]) == 1
    assert "failed: RuntimeError: no room" in capsys.readouterr().out


@pytest.mark.usefixtures("uncompiled")
def test_linear_has_floors_and_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = replace(bench.BENCHMARKS["linear"], tiny=(*linear.TINY, linear.Linear(32, 96, 64)))
    monkeypatch.setitem(bench.BENCHMARKS, "linear", two)
    path = tmp_path / "linear.csv"
    chosen = ["bf16", "delayed_scaling"]
    assert bench.main(["linear", "--device", "cpu", "--providers", ",".join(chosen), "--csv", str(path)]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["provider"] for row in rows] == 2 * chosen
    assert all(float(row["floor_ms"]) > 0 and row["of_floor"].endswith("x") for row in rows)
    table, means = capsys.readouterr().out.split("\n\n")
    assert "of floor" in table.splitlines()[0]
    assert [line.split("  ")[0] for line in means.splitlines()] == ["geometric mean", *chosen]


def test_means_are_geometric_and_of_what_all_sizes_have() -> None:
    rows = [
        {"provider": "rowwise", "over_bf16": "2.00x", "over_torchao": "", "of_floor": "1.10x"},
        {"provider": "rowwise", "over_bf16": "0.50x", "over_torchao": "", "of_floor": "1.10x"},
        {"provider": "once", "over_bf16": "2.00x", "over_torchao": "", "of_floor": ""},
    ]
    assert linear.means(rows, dict.fromkeys(("over_bf16", "over_torchao", "of_floor"), ""))[1:] == [
        ["rowwise", "1.00x", "", "1.10x"]
    ]
    medians = {"bf16": 2.0, "torchao tensorwise": 1.5, "torchao rowwise": 1.8, "rowwise": 1.0, "current_scaling": 1.0}
    assert training.ratios("rowwise", medians, 0.8) == {
        "over_bf16": "2.00x", "over_torchao": "1.80x", "of_floor": "1.25x", "floor_ms": "0.8",
    }  # fmt: skip
    assert training.ratios("current_scaling", medians, None) == {"over_bf16": "2.00x", "over_torchao": "1.50x"}


def test_everyone_has_a_turn_in_each_round() -> None:
    order: list[str] = []

    def contender(name: str) -> rounds.Contender:
        def step() -> None:
            order.append(name)
            if name == "b" and len(order) > 2:
                raise MemoryError("full")

        return rounds.Contender(name, step)

    everyone = [contender(name) for name in "abc"]
    rounds.time_in_turn(everyone, rounds.Turns("cpu", 0.0, rounds.ROUNDS))
    assert order == ["a", "b", "c", "a", "b", "c", "a", "c"]
    assert [len(each.times) for each in everyone] == [3, 0, 3]
    assert everyone[1].row["gemms"] == "failed: MemoryError: full"


def test_a_provider_leaves_inductors_settings_to_the_next() -> None:
    class Tuned(rounds.Problem):
        timed = False

        def contender(self, provider: str, turns: rounds.Turns) -> rounds.Contender:
            found.append(inductor_config.coordinate_descent_tuning)
            inductor_config.coordinate_descent_tuning = True
            return rounds.Contender(provider, lambda: None)

    found: list[bool] = []
    rounds.measure(["first", "second"], Tuned(), rounds.Turns("cpu", 0.0, 1))
    assert found == [False, False] and not inductor_config.coordinate_descent_tuning


def test_a_floor_has_the_fewest_bytes() -> None:
    size = linear.Linear(32, 64, 128)
    elements = 32 * 64 + 128 * 64 + 32 * 128
    for provider, each in {
        "bf16": 0,
        "current_scaling": 6,
        "delayed_scaling": 4,
        "torchao rowwise": 6,
        "mxfp8": 4,
    }.items():
        assert linear.least_cast_bytes(provider, size) == each * elements


@pytest.mark.usefixtures("uncompiled")
def test_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["grouped", "--device", "cpu", "--providers", "bf16,mxfp8,nvfp4,rowwise cached"]) == 0
    shown = capsys.readouterr().out
    assert "4 experts 64x32x48" in shown and shown.count("100%") == 3, "all FLOPs of the experts are quantized"


def test_decode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies of a layer share one compilation, and what is timed quantizes the activation but no weight."""
    compiled: list[torch.fx.Graph] = []

    def compiler(provider: str) -> Any:
        def compile_(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            compiled.append(gm.graph)
            return Backend("high_precision", inner="aot_eager")(gm, inputs)

        return compile_

    monkeypatch.setattr(bench_decode, "compiler", compiler)
    providers = ["bf16", "rowwise", "current_scaling calibrated", "float8_blockwise", *WEIGHT_ONLY]
    assert bench.main(["decode", "--device", "cpu", "--providers", ",".join(providers)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "us" in shown[0].split() and "step ms" not in shown[0] and len(shown) == 1 + 2 * len(providers)
    assert len(compiled) == 2 * len(providers)
    names = [[node.name for node in graph.nodes if "quantize" in node.name] for graph in compiled]
    assert [len(each) for each in names] == [0, 1, 1, 1, 0, 0] * 2
    size = bench_decode.Decode(16, 64, 96)
    assert size.weight_bytes("rowwise") == size.weight_bytes("weight_only_fp8") == 64 * 96
    assert size.weight_bytes("weight_only_nvfp4") == 64 * 96 // 2 + 64 * 96 // 16


def test_a_graph_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        def record(self) -> None: ...
        def replay(self) -> None: ...
        def elapsed_time(self, _: Cuda) -> float:
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Cuda())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Cuda)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    x = torch.ones(1)
    kept = weakref.ref(x)
    step, count = inference.in_a_graph([functools.partial(torch.neg, x)], True)
    del x
    gc.collect()
    step()
    assert kept() is not None and count == 3


def test_attention(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel alone has no backward, and a forward has no gradients to quantize."""

    def compiler(provider: str) -> Any:
        return "eager" if provider == "bf16" else Backend(bench_attention.recipe(provider), inner="aot_eager")

    monkeypatch.setattr(bench_attention, "compiler", compiler)
    assert bench.main(["attention", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("forward and backward") == 7 and shown.count("fp8 kernel") == 1
    assert shown.count("+ fp8 backward") == 3


def test_export(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Folded weights are counted, and attention is given the keys and values of the tokens before."""
    monkeypatch.setattr(bench_export, "package", lambda provider, program: program.module())
    assert bench.main(["export", "--device", "cpu", "--providers", "bf16,rowwise"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "weights GiB" in shown[0] and [line.split(",")[0] for line in shown[1::2]] == [
        "prefill 16",
        "decode 2 after 8",
    ]
    size = bench_export.SIZES[-1]
    with torch.device("meta"):
        y, keys, _ = bench_export.Block(size)(*bench_export.arguments(size))
    assert y.shape == (16, 1, 4096) and keys.shape == (16, 8, 1, 128)


def test_cast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(casts, "Backend", lambda recipe: Backend(recipe, inner="aot_eager"))
    chosen = ["copy", "per_row_e4m3(pow2,torchao)", "mxfp8_e4m3"]
    assert bench.main(["cast", "--device", "cpu", "--providers", ",".join(chosen)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "of copy rate" in shown[0] and len(shown) == 1 + 2 * len(chosen)
    both, columns = casts.TINY
    assert both.least_bytes("mxfp8_e4m3") == 4 * 128 * 256 and both.least_bytes(chosen[1]) == 6 * 128 * 256
    assert columns.least_bytes("mxfp8_e4m3") == 3 * 128 * 256


def test_probe_measures_one_step_in_ten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu()

    class Small(training.Training):
        def model(self) -> nn.Module:
            return Layer(32, 32, dtype=torch.bfloat16)

        def input(self) -> torch.Tensor:
            return torch.randn(16, 32, dtype=torch.bfloat16)

    measured: dict[str, int] = {}
    steps: dict[str, int] = {}
    scope = probing._scope

    @contextlib.contextmanager
    def counted(provider: str, step: Any) -> Any:
        with scope(provider, step) as log:
            yield
        if log:
            steps[provider] = log._session.step + 1
            measured[provider] = len({row["step"] for row in log.rows})

    monkeypatch.setattr(probing, "_scope", counted)
    small = replace(bench.BENCHMARKS["probe"], tiny=[probing.Probed(Small())])
    monkeypatch.setitem(bench.BENCHMARKS, "probe", small)
    monkeypatch.setattr(probing, "backend", lambda model: Backend("current_scaling", model=model, inner="aot_eager"))
    path = tmp_path / "probe.csv"
    assert bench.main(["probe", "--device", "cpu", "--csv", str(path)]) == 0
    with path.open(newline="") as file:
        rows = {row["provider"]: row for row in csv.DictReader(file)}
    assert tuple(rows) == probing.PROVIDERS and rows["no probe"]["probe_cost"] == "+0.0%"
    assert float(rows["measured"]["compile_s"]) > float(rows["every=10"]["compile_s"]), "compiled once for all"
    assert steps["every=10"] == 10 and measured["every=10"] == 1 and measured["measured"] == steps["measured"]
    assert "cost of the probe" in capsys.readouterr().out


def test_groups_share_all_rows_unevenly() -> None:
    for size in training.GROUPS:
        with torch.device("meta"):
            offs = training.Experts(training.Grouped(size.experts, size.m, 16, 16)).offs
        assert offs.shape == (size.experts,)
    experts = training.Experts(training.Grouped(8, 4096, 16, 16))
    sizes = experts.offs.diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert experts.offs[-1] == 4096 and sizes.min() > 0 and sizes.max() > 1.5 * sizes.min()
    with pytest.raises(ValueError, match="no grouped GEMM"):
        training.torchao_grouped_mm("torchao tensorwise")


def test_unknown_provider_names_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["block", "--providers", "fp3"])
    assert "torchao rowwise" in capsys.readouterr().err


def test_llama_blocks() -> None:
    """The sizes of Llama3-8B: 218 million weights a block, and grouped-query attention that is causal."""
    with torch.device("meta"):
        block = training.Block(training.LLAMA3_8B)
    assert sum(p.numel() for p in block.parameters()) == 218_112_000
    stack = training.Blocks(training.TINY_STACK)
    x = training.TINY_STACK.input()
    y = x.clone()
    y[:, 8:] += 1
    assert torch.equal(stack(x)[:, :8], stack(y)[:, :8])


def test_saved_bytes_count_each_storage_once() -> None:
    weight, x = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    saved = training.SavedBytes([weight])
    with saved:
        (x * weight * x).sum()
    assert saved.total == 2 * 4 * 4  # x, and x * weight
