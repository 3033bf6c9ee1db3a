"""ModelFiles: the files of a model, and a name for their content.

Within one process device, inode, size and time stamps of every file name it, compared before and after the
model is loaded. State that leaves the process (a folder on disk, a pickled state) is named by content. See
`llamahybrid.engine.content` for the cost.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path

import xxhash

from llamahybrid.engine.content import SMALL, Abandoned, Nameless, Signature, digest

logger = logging.getLogger("llamahybrid")

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def shards(path: str | os.PathLike[str]) -> list[Path]:
    """Return the absolute paths of a model's files; those of a split model by the first one's name.

    As src/llama-model-loader.cpp, llama_get_list_splits.
    """
    first = str(Path(path).absolute())
    split = _SHARD.fullmatch(first)
    if split is None:
        return [Path(first)]
    prefix, count = split[1], int(split[3])
    every = [Path(f"{prefix}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    there = [p for p in every if p.exists()]  # a merged model may have kept its name
    return there if Path(first) in there else [Path(first)]


class ModelFiles:
    """The files of one model, watched from before it is loaded."""

    def __init__(self, path: str | os.PathLike[str], adapter: str | None = None, *, by_content: bool) -> None:
        """Note the files of a model and of its LoRA `adapter`.

        `by_content`: large files are read at once, while the model is loaded.
        """
        self.by_content = by_content
        self._unnamed = Nameless()
        self._name: bytes | None = None
        self._content: bytes | None = None
        self._error: OSError | None = None
        self._wanted = True
        self._mapped = False
        self._reader: threading.Thread | None = None
        self._files: dict[Path, Signature] = {}
        try:
            files = shards(path) + ([Path(adapter).absolute()] if adapter else [])
            self._files = {file: Signature.of(file) for file in files}
        except OSError as error:  # the load reports it
            self._error = error
        if by_content and self._error is None and any(s.size > SMALL for s in self._files.values()):
            self._reader = threading.Thread(target=self._read, name="llamahybrid-read", daemon=True)
            self._reader.start()

    def loaded(self, *, mapped: bool) -> None:
        """Note that the model is loaded, and verify that its files did not change; waits for the reader.

        `mapped`: pages of the files are read later, too, so that an edit would change the model.
        """
        if self._reader is not None:
            self._reader.join()
        self._mapped = mapped
        if self._error is None and not self._unchanged():
            self._give_up(OSError("the model's files were written to while it was loaded"))

    def abandon(self) -> None:
        """Stop reading: the model was not loaded."""
        self._wanted = False

    @property
    def name(self) -> bytes:
        """16 bytes for use within this process; by content if that was asked for, or costs nothing.

        Small files and those changed a moment ago are named by content in any case.
        """
        if self._name is None:
            self._name = self.content() if self.by_content else self._signed()
        return self._name

    def _signed(self) -> bytes:
        hasher = xxhash.xxh3_128(b"signature")
        try:
            for file, signature in self._files.items():
                certain = signature.size > SMALL and signature.settled
                hasher.update(repr(signature).encode() if certain else digest(file))
        except OSError as error:
            self._give_up(error)
        return self._unnamed if self._error is not None else hasher.digest()

    def content(self) -> bytes:
        """Return 16 bytes that name the content, read now if it was not yet.

        `Nameless` where the content cannot be read, or has changed since the load.
        """
        if self._error is None and self._content is None:
            if self._unchanged():
                self._read()
            else:
                self._give_up(OSError("the model's files were written to since it was loaded"))
        return self._unnamed if self._error is not None or self._content is None else self._content

    def edited(self) -> bool:
        """A mapped file was written to since the last call.

        Replaced and removed files do not matter: the mapping stays. Size and modification time show a write,
        unless that time is set back. The change time would show that, too, but also every chmod and hard link
        (of a backup), and telling these apart means reading the whole file inside a request.
        """
        if not self._mapped:
            return False
        for file, loaded in self._files.items():
            try:
                now = Signature.of(file)
            except OSError:
                continue
            written = (now.size, now.mtime_ns) != (loaded.size, loaded.mtime_ns)
            if written and (now.device, now.inode) == (loaded.device, loaded.inode):
                self._files[file] = now
                self._give_up(OSError(f"{file} was written to while the model is in use"))
                return True
        return False

    def _unchanged(self) -> bool:
        try:
            return all(Signature.of(file) == noted for file, noted in self._files.items())
        except OSError:
            return False

    def _read(self) -> None:
        hasher = xxhash.xxh3_128(b"content")
        try:
            for file in self._files:
                hasher.update(digest(file, lambda: self._wanted))
        except OSError as error:
            self._give_up(error)
        except Abandoned:
            return
        else:
            self._content = hasher.digest()

    def _give_up(self, error: OSError) -> None:
        """Give the model a unique name, since its content is unknown."""
        if self._error is None:
            logger.warning("%s: what is stored now serves no other model or start", error)
        self._error, self._unnamed, self._name = error, Nameless(), None
