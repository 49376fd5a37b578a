"""Exports a model, quantizes the program, compiles it ahead of time, and runs the package from C++ without Python.

Writes model.pt2, runner.cpp and the runner. Needs a C++ compiler.

python docs/examples/export_to_cpp.py --output package
"""

import argparse
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch import nn
from torch.utils.cpp_extension import include_paths, library_paths

import fxquant

RUNNER = """
#include <iostream>
#include <torch/torch.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

int main(int, char** argv) {
  c10::InferenceMode guard;
  torch::inductor::AOTIModelPackageLoader loader(argv[1]);
  auto x = torch::ones({4, 64}).to(torch::Device(argv[2]));
  std::cout << loader.run({x})[0].to(torch::kFloat).sum().item<double>() << std::endl;
}
"""


def built(folder: Path, device: str) -> Path:
    """Returns the C++ program, compiled against the torch that is installed."""
    source, runner = folder / "runner.cpp", folder / "runner"
    source.write_text(RUNNER)
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        raise SystemExit("no C++ compiler: install g++, or name one in CXX")
    libraries = ["torch", "torch_cpu", "c10", *(["torch_cuda", "c10_cuda"] if device == "cuda" else [])]
    subprocess.run(
        [
            compiler, "-std=c++20", "-O1", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{path}" for path in include_paths()), str(source), "-o", str(runner),
            *(flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")),
            "-Wl,--no-as-needed", *(f"-l{name}" for name in libraries),
        ],
        check=True,
    )  # fmt: skip
    return runner


def main(argv: list[str] | None = None) -> None:
    """Compares what Python and C++ compute."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default="package", help="the folder of the package and the runner")
    parser.add_argument("--recipe", default="mxfp8")
    args = parser.parse_args(argv)
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).to(device).eval()
    x = torch.ones(4, 64, device=device)
    program = fxquant.quantize_program(torch.export.export(model, (x,)), args.recipe)
    print(fxquant.report_of(program))
    package = fxquant.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    expected = program.module()(x).float().sum().item()
    answer = subprocess.run([built(folder, device), package, device], capture_output=True, text=True, check=True).stdout
    print(f"from Python {expected:.5f}, from C++ {float(answer):.5f}")


if __name__ == "__main__":
    main()
