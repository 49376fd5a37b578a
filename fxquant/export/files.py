"""Files of exported programs: read with one-sentence errors, written as a whole or not at all."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from fxquant.checks import article
from fxquant.errors import ProgramError
from fxquant.files import write_whole


def load_program(path: str | Path) -> ExportedProgram:
    """`torch.export.load`. Raises ProgramError with the file and the reason if it fails."""
    _check_file(path)
    if not zipfile.is_zipfile(path):
        raise ProgramError(f"{path} is not an exported program, or it is damaged")
    with zipfile.ZipFile(path) as archive:
        damaged, names = archive.testzip(), archive.namelist()
    if damaged is not None:
        raise ProgramError(f"{path} is damaged: the checksum of {damaged} inside it is wrong")
    if not any(name.endswith(".json") for name in names):
        raise ProgramError(
            f"{path} is a zip archive without an exported program in it, which torch.export.save writes: files of "
            "torch.save and torch.jit.save are others"
        )
    with _explained(path, "cannot be loaded as an exported program"):
        return torch.export.load(str(path))


def load_inputs(path: str | Path) -> list[Any]:
    """Calibration inputs from a file of `torch.save([...])`. Raises ProgramError for a file without a list."""
    _check_file(path)
    with _explained(path, "cannot be loaded as calibration inputs"):
        inputs = torch.load(str(path), weights_only=True)
    if not isinstance(inputs, (list, tuple)):
        raise ProgramError(f"{path} holds {article(type(inputs).__name__)}, not a list of calibration inputs")
    return list(inputs)


def _check_file(path: str | Path) -> None:
    if not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "no file on a disk, from which it has to be read"
        raise ProgramError(f"{path} is {what}" if os.path.exists(path) else f"{path}: no such file")
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ProgramError(f"{path} cannot be read: {error.strerror}") from error


def save_program(program: ExportedProgram, path: str | Path) -> None:
    """`torch.export.save` that leaves no half-written file, and an old file as it is if it fails."""
    write_whole(path, lambda file: torch.export.save(program, file))


class _Causes(logging.Handler):
    """Keeps the exceptions that torch logs before it raises one that only points to its log."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


@contextmanager
def _explained(path: str | Path, what: str) -> Iterator[None]:
    """A scope in which torch's error becomes one sentence with the first cause in it."""
    log, causes = logging.getLogger("torch.export"), _Causes()
    before = log.handlers, log.propagate
    log.handlers, log.propagate = [causes], False
    try:
        yield
    except Exception as error:
        cause: BaseException = causes.errors[0] if causes.errors else error
        while (earlier := cause.__cause__ or cause.__context__) is not None:
            cause = earlier
        reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        if " " not in reason:  # the missing key of a KeyError
            reason = f"{type(cause).__name__} {reason}"
        version = torch.__version__
        raise ProgramError(f"{path} {what} by torch {version}: {reason.partition('. ')[0].rstrip('.')}") from error
    finally:
        log.handlers, log.propagate = before
