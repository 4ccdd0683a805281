"""The files of a run: at any moment, a process may die and the next one finds a whole checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any


class RunFolder:
    """The checkpoint of a run and its log.

    ======================  ==========================================================================================
    ``checkpoint-<step>/``  all that the rest of the training depends on: `dsaccel.parallel.save_state`
    ``log.jsonl``           what happened, an object a line, each with the step after which it did
    ``run.json``            the options that decide the result
    ======================  ==========================================================================================

    A name that ends in ``.part`` is of what a process was writing when it died; the next one that writes removes it.

    Args:
        path: the folder; it is made when first written to. Processes that train together have to share it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.log = self.path / "log.jsonl"
        self.options = self.path / "run.json"

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the last checkpoint; None if there is none."""
        # One that `save_state` was about to replace by another of the same step is read by its name, too.
        paths = (path.with_name(path.name.removesuffix(".old")) for path in self.path.glob("checkpoint-*"))
        folders = {step: path for path in paths if (step := _step_of(path)) is not None}
        # Two are there only if a process died between writing the one and removing the other.
        return folders[max(folders)] if folders else None

    def clear(self) -> None:
        """Removes these files, and no others."""
        self._remove_checkpoints()
        for path in (self.log, self.options):
            for name in (path.name, f"{path.name}.part"):
                path.with_name(name).unlink(missing_ok=True)

    def save(self, step: int, write: Callable[[Path], None], *, is_main: bool) -> None:
        """Writes ``checkpoint-<step>``; whoever dies here has the checkpoint before. All ranks call it.

        Args:
            step: how many steps are done.
            write: `dsaccel.parallel.save_state` to a path, which appears there when it is whole; all ranks call it.
            is_main: whether this rank removes the checkpoint before.
        """
        final = self.path / f"checkpoint-{step}"
        if is_main:
            self.path.mkdir(parents=True, exist_ok=True)
            # What a checkpoint counts as logged is on disk before it is.
            if self.log.exists():
                with self.log.open("ab") as file:
                    os.fsync(file.fileno())
        write(final)
        if is_main:
            _sync_folder(self.path)
            self._remove_checkpoints(but=final)

    def append(self, event: dict[str, Any]) -> None:
        """Adds a line to the log."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as file:
            file.write(_line(event))

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What the log has, in order; of one ``kind`` or of all."""
        lines = self.log.read_bytes().split(b"\n")[:-1] if self.log.exists() else []
        events = [json.loads(line) for line in lines]
        return [event for event in events if kind in (None, event["event"])]

    def cut(self, step: int) -> None:
        """Removes from the log what came after ``step``, and a last line that is torn."""
        kept = [event for event in self.events() if event["step"] <= step]
        with replacing(self.log) as file:
            file.writelines(_line(event) for event in kept)

    def _remove_checkpoints(self, but: Path | None = None) -> None:
        for path in self.path.glob("checkpoint-*"):
            step = _step_of(path.with_name(path.name.removesuffix(".part").removesuffix(".old")))
            if path == but or step is None:
                continue
            part = path.with_name(f"checkpoint-{step}.part")
            if path != part:
                # Moved away first: a checkpoint that is removed in part must not look like one.
                shutil.rmtree(part, ignore_errors=True)
                os.replace(path, part)
            # Gone already where the loop has met the other name of this step.
            if part.exists():
                shutil.rmtree(part)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of ``path`` in one move, once it is whole and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    # Without this, a move may be undone by a power cut.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step_of(path: Path) -> int | None:
    digits = path.name.removeprefix("checkpoint-")
    return int(digits) if digits.isascii() and digits.isdigit() else None


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event).encode() + b"\n"
