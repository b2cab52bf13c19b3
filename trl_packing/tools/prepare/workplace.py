"""The folder in which data are prepared, beside the folder that will hold them.

    OUT.partial/lock        held by the command that prepares
    OUT.partial/parts/…     tokenized parts, which an interrupted command finds again
    OUT.partial/result/…    renamed to OUT when everything is on the disk

So OUT is whole or does not exist, whatever stops the command.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trl_packing.data.shards import sync
from trl_packing.tools.prepare.folder_lock import lock


@dataclass(frozen=True)
class Workplace:
    """The folders of one preparation.

    Attributes:
        out: will hold the prepared data.
        key: a hash of the rules; parts of other rules are deleted.
    """

    out: Path
    key: str

    @property
    def folder(self) -> Path:
        return self.out.with_name(f"{self.out.name}.partial")

    @property
    def parts(self) -> Path:
        return self.folder / "parts" / self.key

    @property
    def result(self) -> Path:
        return self.folder / "result"

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make the folders, and delete what a stopped command has left, except for its parts.

        Raises:
            ValueError: another command uses them, or a file cannot be written.
        """
        try:
            with lock(self.folder / "lock"):
                try:
                    self._clear()
                    yield
                finally:
                    shutil.rmtree(self.result, ignore_errors=True)  # frees a full disk
                    if not self._has_parts():
                        self._delete()
        except BlockingIOError as error:
            raise ValueError(f"another command is preparing {self.out} now") from error
        except OSError as error:
            raise ValueError(f"{self.out} cannot be written: {error}; {self.kept()}") from error

    def _clear(self) -> None:
        shutil.rmtree(self.result, ignore_errors=True)
        self.parts.mkdir(parents=True, exist_ok=True)
        for other in self.parts.parent.iterdir():
            if other != self.parts:
                shutil.rmtree(other, ignore_errors=True)
        for file in self.parts.iterdir():
            if file.suffix != ".arrow":  # half of a part, of a process that was killed
                file.unlink(missing_ok=True)

    def _delete(self) -> None:
        """Delete the folder, and its lock last: another command may take it from then on."""
        shutil.rmtree(self.parts.parent, ignore_errors=True)
        with suppress(OSError):
            (self.folder / "lock").unlink()
            self.folder.rmdir()

    def publish(self) -> None:
        """Turn the result into `out`."""
        for path in self.result.rglob("*"):
            sync(path)
        sync(self.result)
        os.rename(self.result, self.out)
        sync(self.out.parent)
        self.forget_parts()

    def forget_parts(self) -> None:
        """Delete the parts: `out` is whole."""
        shutil.rmtree(self.parts, ignore_errors=True)

    def kept(self) -> str:
        """Return a sentence on what is left after an error or an interrupt."""
        if not self._has_parts():
            return "nothing is left behind"
        return f"the same command continues with what {self.folder} keeps"

    def _has_parts(self) -> bool:
        return any(self.parts.glob("*.arrow"))
