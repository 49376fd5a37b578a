"""Takes the pictures of a report's page that docs/debugging.md shows: ``python docs/screenshot.py``.

The report is that of Llama-3-8B on the meta device, estimated for an H100: it takes a minute and no memory. It needs
Chromium, playwright (the extra ``browser``), transformers and Pillow, which makes the pictures small. A saved report
stands in for it where one is named.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import fxquant

PICTURES = Path(__file__).parent / "pictures"
WIDTH, HEIGHT = 1120, 1390


def llama_8b() -> fxquant.Report:
    """The report of a training step of 4096 tokens."""
    sizes = {"vocab_size": 128256, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(**sizes)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
        ids = torch.zeros(1, 4096, dtype=torch.int64)
    return fxquant.explain(model, "rowwise", input_ids=ids, labels=ids, use_cache=False).on("H100")


def shots(browser: Browser, page: Path, scheme: str) -> dict[str, bytes]:
    """Pictures of the upper part of a page, and of what an open row has."""
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
    tab = context.new_page()
    tab.goto(page.as_uri())
    taken = {"report": tab.screenshot()}
    tab.set_viewport_size({"width": WIDTH, "height": 4 * HEIGHT})  # no head of the table stays above the row
    tab.locator("tr.row:has-text('down_proj')").click()
    taken["row"] = tab.locator("tr.detail").screenshot()
    context.close()
    return taken


def main() -> None:
    """Writes report-light.png, report-dark.png, row-light.png and row-dark.png."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "report.html"
        report = fxquant.Report.load(sys.argv[1]) if len(sys.argv) > 1 else llama_8b()
        report.to_html(page)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            for name, taken in shots(browser, page, scheme).items():
                picture = Image.open(io.BytesIO(taken)).convert("RGB").quantize(128)
                picture.save(PICTURES / f"{name}-{scheme}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
