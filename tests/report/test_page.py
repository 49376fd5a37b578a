"""The page of a report in a browser: tree, filter, order, keyboard, links, pictures, themes, widths, size and speed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxquant
from fxquant import CustomRecipe, IdentityQuantizer, NVFP4Quantizer, Rule, Rules
from fxquant.decisions import NotFused
from fxquant.report.html import page, section
from fxquant.report.report import Report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: the extra `browser`")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium is installed; CHROMIUM may name one")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


Open = Callable[..., Any]


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a report's page, offline; at the end it has said nothing and asked for nothing."""
    told: list[str] = []
    contexts = []

    def open_page(report: Report | str, anchor: str = "", **settings: Any) -> Any:
        path = tmp_path / "report.html"
        if isinstance(report, str):
            path.write_text(report, encoding="utf-8")
        else:
            report.to_html(path)
        contexts.append(browser.new_context(offline=True, **{"viewport": {"width": 1280, "height": 900}, **settings}))
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: told.append(message.text))
        tab.on("pageerror", lambda error: told.append(str(error)))
        tab.on("request", lambda request: told.append(request.url) if request.url != tab.url else None)
        tab.goto(f"{path.as_uri()}{anchor}")
        told[:] = [text for text in told if text.partition("#")[0] != path.as_uri()]
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert told == []


def rows(tab: Any) -> list[str]:
    """The names of the rows that are shown."""
    return [name.split("×")[0].strip() for name in tab.locator("tr.row .name").all_inner_texts()]


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.self_attn = nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in ("q", "k", "v", "o")})
        self.mlp = nn.ModuleDict({"gate": nn.Linear(width, hidden), "up": nn.Linear(width, hidden)})
        self.mlp["down"] = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.self_attn[name](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in "qkv")
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.self_attn["o"](attended.transpose(1, 2).flatten(2))
        return x + self.mlp["down"](F.silu(self.mlp["gate"](x)) * self.mlp["up"](x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128256, 4096)
        self.layers = nn.ModuleList([Layer(4096, 14336, 32)])
        self.router = nn.Linear(4096, 8, bias=False)
        self.lm_head = nn.Linear(4096, 128256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x).sum() + self.router(x).sum()


def repeated(report: Report, count: int, detail: str = "") -> Report:
    """The report as if its model had so many layers, each of which may differ by a detail."""
    sites = 1 + max(d.site for d in report.decisions)
    decisions = []
    for i in range(count):
        for d in report.decisions:
            if i and not d.layer.startswith("layers"):
                continue
            name, shift = d.layer.replace("layers.0", f"layers.{i}"), i * sites
            attention = d.attention and replace(d.attention, site=d.attention.site + shift)
            matmul = d.matmul and replace(d.matmul, input=f"{d.matmul.input}+{i}", weight=f"{d.matmul.weight}+{i}")
            facts: dict[str, Any] = {"matmul": matmul, "attention": attention, "site": d.site + shift}
            role, text = replace(d.role, name=name), f"{d.detail}{detail and detail.format(i)}"
            decisions.append(replace(d, role=role, detail=text, **facts))
    return replace(report, decisions=decisions)


@pytest.fixture(scope="module")
def layer() -> Report:
    """One layer of Llama-8B with the head, explained on the meta device, for an H100."""
    with torch.device("meta"):
        model, ids = Llama().bfloat16(), torch.zeros(1, 2048, dtype=torch.int64)
    return fxquant.explain(model, "rowwise", ids).on("H100")


@pytest.fixture(scope="module")
def llama(layer: Report) -> Report:
    return repeated(layer, 32)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 128, 64) / 8)
        self.down_proj = nn.Parameter(torch.randn(4, 64, 64) / 8)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        gate, up = F.grouped_mm(x, self.gate_up_proj.mT, offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down_proj.mT, offs=ends)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.experts = nn.Linear(64, 192), nn.Linear(64, 16), Experts()

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.experts(x.flatten(0, 1), ends).sum() + self.gate(x).sum()


@pytest.fixture(scope="module")
def moe() -> Report:
    x, ends = torch.randn(2, 32, 64).bfloat16(), torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    return fxquant.explain(MoE().bfloat16(), fxquant.Float8CurrentScaling(fp8_dpa=True), x, ends)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(4, 32, 3, padding=1), nn.Conv2d(32, 64, 2, 2)])
        self.mid = nn.Conv2d(64, 64, 1)
        self.up = nn.ModuleList([nn.ConvTranspose2d(64, 32, 2, 2), nn.Conv2d(64, 4, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down[0](x)
        x = self.up[0](self.mid(self.down[1](skip).relu()))
        return self.up[1](torch.cat([x, skip], 1))


@pytest.fixture(scope="module")
def unet() -> Report:
    return fxquant.explain(UNet(), "mxfp8", torch.randn(2, 4, 16, 16))


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break(msg="a look at <values>")
        return self.head(self.second(x))


@pytest.fixture(scope="module")
def broken() -> Report:
    rules = Rules([Rule(IdentityQuantizer(), name="first"), Rule(NVFP4Quantizer(), name="lyers.*")], default="mxfp8")
    return fxquant.explain(Broken(), CustomRecipe(qfactory=rules), torch.randn(32, 64))


def test_tree_opens_and_links(llama: Report, show: Open) -> None:
    tab = show(llama)
    attention, mlp = ["attention", "self_attn", "q", "k", "v", "o"], ["mlp", "gate", "up", "down"]
    assert rows(tab) == ["layers.{0..31}", *attention, *mlp, "lm_head", "router"]
    tab.click("tr.row:has-text('down')")
    opened = tab.locator("tr.detail").inner_text()
    for said in ("grad_output", "columnwise", "[4096, 14336]", "each of 32", "cuBLAS _scaled_mm, rowwise", "MiB →"):
        assert said in opened
    tab.click("tr.row:has-text('layers.')")
    assert rows(tab) == ["layers.{0..31}", "lm_head", "router"]
    tab = show(llama, "#layers.7.mlp.up")
    assert (
        "tr.detail" and tab.locator("tr.detail").count() == 1 and tab.evaluate("document.activeElement.dataset.index")
    )
    assert tab.locator("tr.row[aria-expanded=true].leaf .name").inner_text() == "up"


def test_filter_takes_whole_numbers_and_finds_everything(layer: Report, show: Open) -> None:
    tab = show(repeated(layer, 12, " a{}"))
    for text, count in (
        ("layers.1", 8), ("layers.10", 8), ("layers.1 mlp", 3), ("layers.1.mlp.do", 1), ("TOO_SMALL", 1), ("128256", 1),
        ("12825", 0), ("_scaled_mm", 12 * 7 + 1), ("wgrad a11", 8), ("fast accumulation nothing", 0),
    ):  # fmt: skip
        tab.fill("input[type=search]", text)
        assert tab.locator(".tools output").inner_text() == f"{count} of 98 rows", text
        assert tab.locator("tr.row.leaf").count() >= min(count, 20)
    assert tab.locator(".none").is_visible()
    tab.keyboard.press("Escape")
    tab.select_option(".kind", "unquantized")
    assert set(rows(tab)) >= {"router", "attention"} and "lm_head" not in rows(tab)


def test_order(llama: Report, show: Open) -> None:
    tab = show(llama)
    tab.click("th[data-key=time] button")
    assert (
        rows(tab)[0] == "layers.{0..31}.mlp.down"
        and tab.get_attribute("th[data-key=time]", "aria-sort") == "descending"
    )
    tab.click("th[data-key=time] button")
    assert rows(tab)[-1] == "layers.{0..31}.mlp.down"
    tab.select_option(".sort", "flops")
    assert "mlp" in rows(tab)[0]
    tab.select_option(".sort", "model")
    assert rows(tab)[0] == "layers.{0..31}"


def test_keyboard(llama: Report, show: Open) -> None:
    tab = show(llama)
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.type") == "search"
    tab.locator("tr.row").first.focus()
    for keys, name in (
        ("ArrowDown ArrowDown ArrowDown", "q"), ("ArrowUp", "self_attn"), ("End", "router"),
        ("Home", "layers.{0..31}"),
        ("ArrowRight", "attention"), ("Enter", "attention"),
    ):  # fmt: skip
        for key in keys.split():
            tab.keyboard.press(key)
        assert tab.locator("tr.row:focus .name").inner_text() == name
    assert tab.locator("tr.detail").count() == 1
    for key in ("Enter", "ArrowLeft", "ArrowLeft"):
        tab.keyboard.press(key)
    assert "attention" not in rows(tab) and tab.locator("tr.row:focus .name").inner_text() == "layers.{0..31}"
    tab.locator("details.group summary").first.focus()
    tab.keyboard.press("Enter")
    assert not tab.locator("details.group").first.get_attribute("open")


def test_the_page_alone_answers(llama: Report, unet: Report, broken: Report, show: Open) -> None:
    """Which layers are not quantized, how many FLOPs, why, what to do, and which layer takes most time."""
    tab = show(llama)
    group = tab.locator("details.group").first.inner_text()
    for said in ("HIGH_PRECISION", "32 layers", "layers.{0..31} attention", "TFLOP", "fp8_dpa=True"):
        assert said in group
    cards = tab.locator(".cards").inner_text()
    assert "Longest: layers.{0..31}.mlp.down" in cards and "Saved for the backward" in cards and "GiB →" in cards
    tab = show(unet)
    text = tab.locator("main").inner_text()
    for said in ("CONVOLUTION", "kernel 3x3", "up.1", "Most FLOPs", "where their kernel is 1"):
        assert said in text
    tab = show(broken)
    text = tab.locator("main").inner_text()
    for said in ("Broken", "Graph breaks", "a look at <values>", "Unused in the recipe", "lyers.*", "TOO_SMALL", "N=8"):
        assert said in text
    assert "1 graph break, 1 unused rule" in text and torch.__version__ in text
    tab.click("summary:has-text('Python')")
    assert "recipe = CustomRecipe(" in tab.locator("header pre").inner_text()


def test_attention_and_experts_have_their_own_names(moe: Report, show: Open) -> None:
    tab = show(moe)
    tab.click("tr.row:has(.name:text-is('attention'))")
    opened = tab.locator("tr.detail").inner_text()
    for said in ("QK^T fprop", "PV wgrad", "dpa.qkv", "dpa.s", "dpa.do", "dpa.dp"):
        assert said in opened
    assert "input" not in opened and {"experts", "gate_up_proj", "down_proj", "gate"} <= set(rows(tab))


def test_pictures_and_fusions_stand_in_the_rows_of_their_layers(broken: Report, show: Open) -> None:
    drawn = {
        "second": {"forward": "<svg width='20' height='20'><title>second</title><rect width='9' height='9'/></svg>"}
    }
    left = NotFused(step="fuse_epilogues", layer="second", operator="scaled_mm", reason="no rates for + bias")
    tab = show(replace(broken, views={}, drawn=drawn, not_fused=[left]))
    tab.click("tr.row:has-text('second')")
    assert tab.locator("tr.detail svg rect").count() == 1
    opened = tab.locator("tr.detail").inner_text()
    assert "In the forward graph" in opened and "no rates for + bias" in opened
    tab.click("tr.row:has-text('head')")
    assert tab.locator("tr.detail").count() == 2 and tab.locator(".picture").count() == 1


def test_the_stepper_goes_through_the_passes(show: Open) -> None:
    x = torch.randn(32, 64, requires_grad=True)
    tab = show(fxquant.explain(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), "mxfp8", x, stages=True))
    assert tab.locator(".steps .because").inner_text() == "everything else reads matmuls as facts"
    assert tab.locator(".steps .changed").count() == 1 and tab.locator(".steps button").first.is_disabled()
    tab.locator(".steps select").select_option("captured: insert, captured, 3 changed")
    assert "fxquant::linear" in tab.locator(".steps .new").inner_text() and tab.locator(".steps .gone").count() == 1
    lines = tab.locator(".steps pre span").count()
    tab.locator(".steps input").check()
    assert tab.locator(".steps pre span").count() < lines
    tab.locator(".steps button").last.click()
    assert tab.locator(".steps select").input_value().startswith(("joint: ", "meaning: "))


@pytest.mark.parametrize("name", ["llama", "moe", "unet", "broken"])
def test_themes_and_narrow_windows(name: str, request: pytest.FixtureRequest, show: Open) -> None:
    report = request.getfixturevalue(name)
    tab = show(report, color_scheme="dark", viewport={"width": 420, "height": 800}, has_touch=True)
    tab.click(".open")
    for row in tab.locator("tr.leaf").all()[:2]:
        row.tap()
    background = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(background)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 420
    tab.click(".theme")
    light = tab.evaluate(background)
    assert max(map(int, dark[4:-1].split(","))) < 60 < 200 < min(map(int, light[4:-1].split(",")))
    assert tab.locator("[title]:not(.anchor)").count() == 0, "what a finger cannot read"
    assert tab.evaluate("[...document.querySelectorAll('th')].every(th => th.scope)")


def test_size_and_speed(layer: Report, llama: Report, show: Open, tmp_path: Path) -> None:
    """The bounds of Llama-8B's page, 1.5 MB, 1 s and 50 ms, also where no two layers are equal; times with slack."""
    for report in (llama, repeated(layer, 32, " as{}")):
        start = time.perf_counter()
        tab = show(report)
        opened = time.perf_counter() - start
        assert (tmp_path / "report.html").stat().st_size < 1.5e6
        keys = tab.evaluate("""() => [..."layers.1 mlp"].map((_, i, all) => Math.min(...[1, 2, 3, 4].map(() => {
            const input = document.querySelector("input[type=search]"), start = performance.now();
            input.value = all.slice(0, i + 1).join("");
            input.dispatchEvent(new Event("input"));
            document.body.offsetHeight;
            return performance.now() - start;
        })))""")
        load = tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
        print(f"{(tmp_path / 'report.html').stat().st_size} bytes, load {load:.0f} ms, opened {opened:.2f} s, "
              f"keys {min(keys):.1f} to {max(keys):.1f} ms")  # fmt: skip
        assert load < 3000 and sorted(keys)[len(keys) // 2] < 100 and max(keys) < 200


def test_several_reports_on_one_page_have_links_of_their_own(broken: Report, moe: Report, show: Open) -> None:
    text = page("two", section(broken, "own rules") + section(moe, "FP8") + section(broken, "again"))
    tab = show(text, "#again:second")
    assert tab.locator("tr.row[aria-expanded=true].leaf").count() == tab.locator("tr.detail").count() == 1
    ids = tab.evaluate("[...document.querySelectorAll('[id]')].map(element => element.id)")
    assert len(ids) == len(set(ids)) and {"own-rules:why", "FP8:why", "again:also"} <= set(ids)
    links = tab.evaluate("[...document.querySelectorAll('a:not(.anchor)')].map(link => link.getAttribute('href'))")
    assert {"#own-rules:also", "#again:why"} <= set(links) and not {"#why", "#also"} & set(links)


def test_a_legend_says_what_squares_and_bars_are(llama: Report, broken: Report, show: Open) -> None:
    legend = show(llama).locator(".legend").inner_text()
    for said in ("FP8, one scale per row", "its left and its right operand", "QK^T", "time in high precision"):
        assert said in legend
    legend = show(broken).locator(".legend").inner_text()
    assert "share of all FLOPs" in legend and "time" not in legend and "QK^T" not in legend


def test_tables_are_lists_in_a_narrow_window(broken: Report, show: Open) -> None:
    left = NotFused(step="fuse_epilogues", layer="second", operator="scaled_mm", reason="why " * 20, graph="forward")
    tab = show(replace(broken, not_fused=[left]), viewport={"width": 420, "height": 800})
    table = tab.locator("details:has-text('Not fused') table.stack").first
    assert table.evaluate("element => element.scrollWidth <= element.parentElement.clientWidth")
    assert "A GEMM does not finish its result itself, because why" in table.inner_text()
