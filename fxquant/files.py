"""Files that are written as a whole or not at all, with one-sentence errors."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fxquant.checks import article
from fxquant.errors import ProgramError


def check_place(path: str | Path) -> None:
    """Raises ProgramError if no file of this name can be written, before anything is computed."""
    if not isinstance(path, str | os.PathLike):
        raise ProgramError(f"a path is expected, not {article(type(path).__name__)}")
    if not os.path.isdir(Path(path).parent):
        raise ProgramError(f"{Path(path).parent}: no such folder")
    if os.path.isdir(path):
        raise ProgramError(f"{path} cannot be written: it is a folder")
    try:
        os.stat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ProgramError(f"{path} cannot be written: {error.strerror}") from error
    if not os.path.isfile(path):
        raise ProgramError(f"{path} cannot be written: it is no regular file, which a new one could take the place of")


def check_outputs(outputs: Sequence[str | Path], inputs: Sequence[str | Path]) -> None:
    """Raises ProgramError for an output that cannot be written, is an input, or is another output.

    Files are compared as the file system does, so that links and other spellings of a path are seen.
    """
    for i, path in enumerate(outputs):
        if str(path) == "-":
            raise ProgramError("- stands for no output: a file is written, whose path is expected")
        check_place(path)
        with _telling(path), tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent):
            pass
        if any(_same(path, other) for other in inputs):
            raise ProgramError(f"{path} is an input, which would be overwritten: choose another path for the output")
        if any(_same(path, other) for other in outputs[:i]):
            raise ProgramError(f"{path}: the outputs need a file each")


@contextmanager
def _telling(path: str | Path) -> Iterator[None]:
    """A scope whose errors of the system become one sentence."""
    try:
        yield
    except OSError as error:
        raise ProgramError(f"{path} cannot be written: {error.strerror}") from error


def _same(path: str | Path, other: str | Path) -> bool:
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


@contextmanager
def in_its_place(path: str | Path) -> Iterator[Path]:
    """A scope that writes another file of the same name, which then takes the place of `path`.

    Raises ProgramError if that is impossible, before anything is done.
    """
    check_place(path)
    place = Path(os.path.realpath(path))
    check_place(place)
    with _telling(path):
        folder = tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        yield Path(folder) / place.name
        os.replace(Path(folder) / place.name, place)
    finally:
        shutil.rmtree(folder)


def write_whole(path: str | Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file beside `path` and then puts it in its place. Raises ProgramError if that fails.

    The target of a link is replaced, not the link.
    """
    check_place(path)
    target = os.path.realpath(path)
    with _telling(target), in_its_place(target) as place:
        with _File(io.FileIO(place, "wb")) as file:
            write(file)
        if file.failed is not None:
            raise file.failed


class _File(io.BufferedWriter):
    """A file that keeps its first error and goes on: an exception would end the process in torch's C++ writer."""

    failed: OSError | None = None

    def write(self, data: Any, /) -> int:
        self._keep(lambda: io.BufferedWriter.write(self, data))
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._keep(lambda: io.BufferedWriter.flush(self))

    def _keep(self, run: Callable[[], object]) -> None:
        if self.failed is None:
            try:
                run()
            except OSError as error:
                self.failed = error
