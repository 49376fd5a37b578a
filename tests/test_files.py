from __future__ import annotations

import os
from pathlib import Path

import pytest

from fxquant.errors import ProgramError
from fxquant.files import write_whole


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "out.pt2"
    path.write_bytes(b"old")

    def stop(_file: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, stop)
    with pytest.raises(ProgramError, match="No space left"):
        write_whole(path, lambda _file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert path.read_bytes() == b"old" and [file.name for file in tmp_path.iterdir()] == ["out.pt2"]
    with pytest.raises(ProgramError, match="no such folder"):
        write_whole(tmp_path / "absent" / "out.pt2", stop)


def test_links_are_followed_and_other_than_files_stay(tmp_path: Path) -> None:
    target, link, pipe = (tmp_path / name for name in ("target.pt2", "link.pt2", "pipe"))
    link.symlink_to(target)
    for _ in range(2):
        write_whole(link, lambda file: file.write(b"new"))
    assert link.is_symlink() and target.read_bytes() == b"new"
    os.mkfifo(pipe)
    with pytest.raises(ProgramError, match="no regular file"):
        write_whole(pipe, lambda file: file.write(b"new"))
    assert pipe.is_fifo() and not list(tmp_path.glob(".*"))
