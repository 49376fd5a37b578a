"""A small C++ program that runs a package, and how it is built against the torch that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

SOURCE = """
#include <fstream>
#include <iostream>
#include <iterator>
#include <ATen/core/ivalue.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

at::Tensor read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return torch::jit::pickle_load(bytes).toTensor();
}

int main(int, char** argv) {
  c10::InferenceMode guard;
  torch::inductor::AOTIModelPackageLoader loader(argv[1]);
  auto y = loader.run({read(argv[2]).to(at::Device(argv[4]))})[0].cpu().to(at::kDouble);
  auto wanted = read(argv[3]).to(at::kDouble);
  bool same = y.sizes() == wanted.sizes() &&
      y.sub(wanted).norm().item<double>() <= std::stod(argv[5]) * wanted.norm().item<double>();
  std::cout << (same ? "same" : "different") << std::endl;
  return same ? 0 : 1;
}
"""


def build(folder: Path, device: str) -> Path:
    """The program compiled in a folder, for packages of a device."""
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, runner = folder / "runner.cpp", folder / "runner"
    source.write_text(SOURCE)
    abi = int(torch.compiled_with_cxx11_abi())
    flags = ["-std=c++20", "-O0", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *(f"-I{each}" for each in include_paths())]
    places = [item for each in library_paths() for item in (f"-L{each}", f"-Wl,-rpath,{each}")]
    libraries = ["torch", "torch_cpu", "c10", *(["torch_cuda", "c10_cuda"] if device == "cuda" else [])]
    link = ["-Wl,--no-as-needed", *(f"-l{name}" for name in libraries)]
    made = subprocess.run(
        [compiler, *flags, str(source), "-o", str(runner), *places, *link], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return runner


def check(runner: Path, package: str | Path, device: str, x: Tensor, y: Tensor, tolerance: float) -> None:
    """Fails unless the package makes of x a tensor whose distance from y is within a share of y's norm."""
    folder = runner.parent
    torch.save(x, folder / "x.pt")
    torch.save(y, folder / "y.pt")
    command = [str(runner), str(package), str(folder / "x.pt"), str(folder / "y.pt"), device, str(tolerance)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "same", done.stderr
