"""The files of this repository: those that are committed, and new ones that git does not ignore."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def files_of_repository(*under: str) -> list[str]:
    """Return the files, relative to `ROOT`; those of the folders `under` where some are named."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *under]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def copy_repository(folder: Path) -> None:
    """Copy the files to `folder`. Caches stay behind: other processes write and remove them now."""
    for name in files_of_repository():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
