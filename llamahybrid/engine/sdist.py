"""The pinned source distribution of llama-cpp-python: fetched once, checked by hash whenever it is opened.

Everything that is not ours comes out of it: the engine's source, real vocabularies, chat templates and
upstream's own test-suite. It is fetched with pip, so that the user's package index, proxy and certificates
apply as they do everywhere else.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llamahybrid.engine.storage import disk_errors, scratch, workshop
from llamahybrid.errors import EngineError


@dataclass(frozen=True)
class Pin:
    """One release of llama-cpp-python, named by its content."""

    version: str
    sha256: str

    @property
    def folder(self) -> str:
        """The archive's top folder."""
        return f"llama_cpp_python-{self.version}"

    @property
    def archive(self) -> str:
        """The archive's file name."""
        return f"{self.folder}.tar.gz"


PIN = Pin("0.3.36", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e")

# `pip download` asks the sdist's build backend for metadata and, left alone, installs a whole build
# environment to do so (most of a minute). Only the checked archive is wanted, so a backend of the same name
# that knows nothing but name and version answers instead.
_BACKEND = """\
import pathlib

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder, "llama_cpp_python-{version}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: llama_cpp_python\\nVersion: {version}\\n")
    return info.name
"""


def cache_dir() -> Path:
    """The folder for everything that can be fetched or built again (`LLAMAHYBRID_CACHE_DIR` overrides)."""
    override = os.environ.get("LLAMAHYBRID_CACHE_DIR")
    if override:
        return Path(override).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("llamahybrid", appauthor=False)


@disk_errors()
def fetch() -> Path:
    """The pinned sdist on disk, verified; downloaded through pip when it is missing or damaged.

    Raises:
        EngineError: pip could not get it, what it got has another hash, or the disk says no.
    """
    path = cache_dir() / "sdist" / PIN.archive
    if _is_there(path):
        return path
    with workshop(path) as folder:
        if _is_there(path):  # another process has fetched it meanwhile
            return path
        got = _download(folder)
        if sha256(got) != PIN.sha256:
            raise EngineError(
                f"{PIN.archive} from the package index does not have sha256 {PIN.sha256}; "
                "check the index that pip is configured to use (`pip config list`)"
            )
        os.replace(got, path)
    return path


@disk_errors()
def member(name: str) -> Path:
    """One file of the sdist, e.g. ``vendor/llama.cpp/models/ggml-vocab-qwen35.gguf``, kept in the cache.

    Args:
        name: path inside the archive, without its top folder.

    Raises:
        EngineError: the sdist cannot be had, or holds no such file.
    """
    inside = PurePosixPath(name)
    if inside.is_absolute() or ".." in inside.parts:
        raise EngineError(f"{name!r} is not a path inside {PIN.archive}")
    path = cache_dir() / "sdist" / PIN.sha256[:16] / inside
    if path.is_file():
        return path
    with tarfile.open(fetch()) as archive:
        try:
            stream = archive.extractfile(f"{PIN.folder}/{inside}")
        except KeyError:
            stream = None
        if stream is None:
            raise EngineError(f"{PIN.archive} holds no file {name!r}; list them with `tar tzf {fetch()}`")
        with stream, scratch(path.parent) as folder:
            part = folder / inside.name
            with part.open("wb") as out:
                shutil.copyfileobj(stream, out)
            os.replace(part, path)
    return path


@disk_errors()
def unpack(dest: Path) -> Path:
    """The whole tree of the sdist at `dest`, without the top folder; all of it or nothing.

    Raises:
        EngineError: `dest` exists and is not an empty folder, or the sdist cannot be had.
    """
    if dest.exists() and not (dest.is_dir() and not any(dest.iterdir())):
        raise EngineError(f"{dest} is in the way; remove it or name another folder")
    with tarfile.open(fetch()) as archive, scratch(dest.absolute().parent) as folder:
        # The archive is known by its hash, so its members need no filter (and Python < 3.10.12 has none).
        archive.extraction_filter = lambda info, _: info
        archive.extractall(folder)
        if dest.exists():
            dest.rmdir()
        os.replace(folder / PIN.folder, dest)
    return dest


def _download(folder: Path) -> Path:
    backend = folder / "backend" / "scikit_build_core"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build.py").write_text(_BACKEND.format(version=PIN.version))
    pinned = folder / "requirements.txt"
    pinned.write_text(f"llama-cpp-python=={PIN.version} --hash=sha256:{PIN.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder), "-r", str(pinned)]
    search = os.pathsep.join(filter(None, [str(backend.parent), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True)
    if run.returncode:
        raise EngineError(
            f"pip could not fetch {PIN.archive} (exit {run.returncode}); check the network and "
            f"`pip config list`, then try again\n{run.stderr.strip()}"
        )
    return folder / PIN.archive


def _is_there(path: Path) -> bool:
    return path.is_file() and sha256(path) == PIN.sha256


def sha256(path: Path) -> str:
    """The hash of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
