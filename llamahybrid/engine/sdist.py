"""Source distributions of llama-cpp-python: fetched once, checked by hash whenever one is opened.

Everything that is not ours comes out of them: the engine's source, real vocabularies, chat templates and
upstream's own test-suite. They are fetched with pip, so that the user's package index, proxy and certificates
apply as they do everywhere else.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

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
"""The release that everything is proven on, and that vocabularies and chat templates come from. An engine is
built of the one that is installed, if there are patches for it (`series.pin`)."""

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
    """The folder for everything that can be fetched or built again (`LLAMAHYBRID_CACHE_DIR` overrides).

    Raises:
        EngineError: this user has no home folder, as in some containers, or whom the override names has none.
    """
    override = os.environ.get("LLAMAHYBRID_CACHE_DIR")
    homeless = "there is no home folder to keep a cache in; set LLAMAHYBRID_CACHE_DIR to a folder of your own"
    try:
        if override:
            homeless = f"LLAMAHYBRID_CACHE_DIR={override}: nobody of that name has a home folder"
            return Path(override).expanduser().absolute()
        from platformdirs import user_cache_path

        found = user_cache_path("llamahybrid", appauthor=False)
    except RuntimeError as error:
        raise EngineError(homeless) from error
    if found.parts[:1] == ("~",):  # what older platformdirs give
        raise EngineError(homeless)
    return found


@disk_errors()
def fetch(pin: Pin | None = None) -> Path:
    """An sdist (None: of `PIN`) on disk, verified; downloaded through pip when it is missing or damaged.

    Raises:
        EngineError: pip could not get it, what it got has another hash, or the disk says no.
    """
    pin = pin or PIN
    path = cache_dir() / "sdist" / pin.archive
    if _is_there(path, pin):
        return path
    with workshop(path) as folder:
        if _is_there(path, pin):  # another process has fetched it meanwhile
            return path
        got = _download(folder, pin)
        if sha256(got) != pin.sha256:
            raise EngineError(
                f"{pin.archive} from the package index does not have sha256 {pin.sha256}; "
                "check the index that pip is configured to use (`pip config list`)"
            )
        os.replace(got, path)
    return path


@disk_errors()
def member(name: str, pin: Pin | None = None) -> Path:
    """One file of an sdist, e.g. ``vendor/llama.cpp/models/ggml-vocab-qwen35.gguf``, kept in the cache.

    Args:
        name: path inside the archive, without its top folder.
        pin: which sdist; None: `PIN`.

    Raises:
        EngineError: the sdist cannot be had, or holds no such file.
    """
    pin = pin or PIN
    inside = _inside(name, pin)
    path = cache_dir() / "sdist" / pin.sha256[:16] / inside
    if path.is_file():
        return path
    with (
        tarfile.open(fetch(pin)) as archive,
        _stream(archive, inside, pin) as stream,
        scratch(path.parent) as folder,
    ):
        part = folder / inside.name
        with part.open("wb") as out:
            shutil.copyfileobj(stream, out)
        os.replace(part, path)
    return path


@disk_errors()
def read(*names: str) -> dict[str, bytes]:
    """Files of the sdist, out of the archive whose hash was just looked at: for what is to be executed.

    Raises:
        EngineError: the sdist cannot be had, or holds no such file.
    """
    found = {}
    with tarfile.open(fetch()) as archive:
        for name in names:
            with _stream(archive, _inside(name, PIN), PIN) as stream:
                found[name] = stream.read()
    return found


def _inside(name: str, pin: Pin) -> PurePosixPath:
    inside = PurePosixPath(name)
    if inside.is_absolute() or ".." in inside.parts:
        raise EngineError(f"{name!r} is not a path inside {pin.archive}")
    return inside


def _stream(archive: tarfile.TarFile, inside: PurePosixPath, pin: Pin) -> IO[bytes]:
    try:
        stream = archive.extractfile(f"{pin.folder}/{inside}")
    except KeyError:
        stream = None
    if stream is None:
        name = str(inside)
        raise EngineError(f"{pin.archive} holds no file {name!r}; list them with `tar tzf {fetch(pin)}`")
    return stream


@disk_errors()
def unpack(dest: Path, pin: Pin | None = None) -> Path:
    """The whole tree of an sdist (None: of `PIN`) at `dest`, without the top folder; all of it or nothing.

    Raises:
        EngineError: `dest` exists and is not an empty folder, or the sdist cannot be had, or is none.
    """
    if dest.exists() and not (dest.is_dir() and not any(dest.iterdir())):
        raise EngineError(f"{dest} is in the way; remove it or name another folder")
    pin = pin or PIN
    path = fetch(pin)
    with scratch(dest.absolute().parent) as folder:
        try:
            with tarfile.open(path) as archive:
                # Python < 3.10.12 has none; then all that comes here is known by its hash (`_require_filter`)
                archive.extraction_filter = getattr(tarfile, "data_filter", lambda info, _: info)
                archive.extractall(folder)
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise EngineError(f"{path} cannot be unpacked: {error}") from error
        if not (folder / pin.folder).is_dir():
            raise EngineError(f"{path} is no sdist of llama-cpp-python {pin.version}: no {pin.folder} in it")
        if dest.exists():
            dest.rmdir()
        os.replace(folder / pin.folder, dest)
    return dest


def _require_filter() -> None:
    """Raise EngineError where an archive that somebody else made could write anywhere when it is unpacked."""
    if not hasattr(tarfile, "data_filter"):
        raise EngineError("sources that are not pinned are unpacked by Python 3.10.12, 3.11.4 or newer")


def latest() -> str:
    """The newest release that pip finds.

    Raises:
        EngineError: pip cannot say.
    """
    command = [sys.executable, "-m", "pip", "index", "versions", "llama-cpp-python"]
    run = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"^Available versions: ([\w.+]+)", run.stdout, re.MULTILINE)
    if run.returncode or not found:
        raise EngineError(f"pip does not say which releases there are\n{run.stderr.strip()}")
    return found.group(1)


@disk_errors()
def obtain(version: str) -> Pin:
    """Fetch a release whose hash is not known yet: what comes is taken for it, and kept as `fetch` does.

    What lies there already may be of another origin (`take`), and does not count.

    Raises:
        EngineError: pip could not get it.
    """
    _require_filter()
    path = cache_dir() / "sdist" / Pin(version, "").archive
    with workshop(path) as folder:
        os.replace(_download(folder, Pin(version, "")), path)
    return Pin(version, sha256(path))


@disk_errors()
def take(file: Path, version: str) -> Pin:
    """Keep an sdist that lies somewhere as `fetch` does; it stays where it is. Raises EngineError."""
    _require_filter()
    path = cache_dir() / "sdist" / Pin(version, "").archive
    pin = Pin(version, sha256(file))
    with workshop(path) as folder:
        if not _is_there(path, pin):
            shutil.copyfile(file, folder / path.name)
            os.replace(folder / path.name, path)
    return pin


def _download(folder: Path, pin: Pin) -> Path:
    backend = folder / "backend" / "scikit_build_core"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build.py").write_text(_BACKEND.format(version=pin.version))
    pinned = folder / "requirements.txt"
    wanted = f"llama-cpp-python=={pin.version}"
    pinned.write_text(f"{wanted} --hash=sha256:{pin.sha256}\n" if pin.sha256 else f"{wanted}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--require-hashes"] if pin.sha256 else []
    command += ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder), "-r", str(pinned)]
    search = os.pathsep.join(filter(None, [str(backend.parent), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True)
    if run.returncode:
        raise EngineError(
            f"pip could not fetch {pin.archive} (exit {run.returncode}); check the network and "
            f"`pip config list`, then try again\n{run.stderr.strip()}"
        )
    return folder / pin.archive


def _is_there(path: Path, pin: Pin) -> bool:
    return path.is_file() and sha256(path) == pin.sha256


def sha256(path: Path) -> str:
    """The hash of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
