"""Reports from their JSON: the decisions with their facts, and the times as they were estimated then."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from fxquant.checks import article
from fxquant.cost.work import Estimate, Work
from fxquant.decisions import Attended, Decision, Matmul, SkipReason
from fxquant.errors import ProgramError
from fxquant.formats import QuantSpec
from fxquant.kernels.linear.problem import Problem
from fxquant.quantizers import Quantizer
from fxquant.report.codec import decode
from fxquant.report.data import EpilogueGemm, ReportData
from fxquant.report.json import SCHEMA
from fxquant.roles import Direction, Gemm, QuantizerRole


@dataclass(frozen=True)
class WrittenQuantizer(Quantizer):
    """The quantizer of a decision that was read: the text of its format and settings."""

    text: str

    def spec(self, direction: Direction) -> QuantSpec:
        """The format and settings of the one direction that was written."""
        return QuantSpec.parse(self.text)


def arguments_of(text: str, origin: str = "the text") -> dict[str, Any]:
    """The fields of a report from its JSON, which came from somewhere, such as a path.

    Raises ProgramError for what is not the JSON of a report, is folded, or has a newer form.
    """
    content = _object(text, origin)
    try:
        return _arguments(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ProgramError(f"{origin} is a report whose fields cannot be read ({problem})") from error


def read_text(path: str | Path) -> str:
    """The text of a file. Raises ProgramError if it cannot be read."""
    if not isinstance(path, str | os.PathLike):
        raise ProgramError(f"a path is expected, not {article(type(path).__name__)}")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ProgramError(f"{path} cannot be read: {why}") from error


def _object(text: str, origin: str) -> dict[str, Any]:
    """The JSON of a report whose form is known."""
    how = "report.to_json() and `fxquant explain --json` write one"
    try:
        content = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ProgramError(f"{origin} is not JSON, and so no report ({error}): {how}") from error
    if not isinstance(content, dict) or not {"schema", "recipe", "decisions"} <= set(content):
        raise ProgramError(f"{origin} is JSON, but not of a report: {how}")
    if content["schema"] != SCHEMA:
        raise ProgramError(
            f"{origin} has the form {content['schema']} of a report, and this fxquant reads {SCHEMA}: write it again"
        )
    if any(isinstance(decision, dict) and "layers" in decision for decision in content["decisions"] or ()):
        raise ProgramError(f"{origin} has its layers folded: write it without --collapse or collapse=True")
    if content["decisions"] and "products" not in content:
        raise ProgramError(f"{origin} was written by an fxquant whose reports cannot be read back: write it again")
    return content


def _arguments(content: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(ReportData)
    plain = [f.name for f in fields(ReportData) if f.name not in ("decisions", "epilogues", "estimated")]
    arguments = {name: decode(hints[name], content[name]) for name in plain if name in content}
    products = {product["site"]: product for product in content.get("products", ())}
    arguments["decisions"] = [_decision(item, products[item["site"]]) for item in content["decisions"]]
    pairs = Counter((d.site, d.gemm) for d in arguments["decisions"])
    if alone := next((pair for pair, count in pairs.items() if count < 2), None):
        raise ValueError("the {1} of site {0} has one operand alone".format(*alone))
    arguments["epilogues"] = [_epilogue(item) for item in content["epilogues"]]
    arguments["estimated"] = {
        site: _estimate(product) for site, product in products.items() if product["work"] is not None
    }
    return arguments


def _decision(item: Mapping[str, Any], product: Mapping[str, Any]) -> Decision:
    return Decision(
        role=QuantizerRole(item["module_type"], item["tensor_type"], item["layer"]),
        gemm=Gemm(item["gemm"]),
        direction=Direction(item["direction"]),
        shape=tuple(item["shape"]),
        quantizer=None if item["spec"] is None else WrittenQuantizer(item["spec"]),
        skip_reason=item["skip_reason"] and SkipReason(item["skip_reason"]),
        matmul=decode(Matmul | None, product["matmul"]),
        attention=decode(Attended | None, product["attention"]),
        **{name: item[name] for name in ("detail", "form", "site", "flops", "shared", "bits", "part")},
        merged=item.get("merged", False),
    )


def _estimate(product: Mapping[str, Any]) -> Estimate:
    work = (Work(w["what"], w["kernel"], w["unquantized_us"], w["quantized_us"]) for w in product["work"])
    return Estimate(tuple(work), product["reference"])


def _epilogue(item: Mapping[str, Any]) -> EpilogueGemm:
    return EpilogueGemm(item["layer"], item["graph"], decode(Problem, item["problem"]), item["card"])
