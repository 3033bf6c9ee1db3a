"""Source distributions of llama-cpp-python: fetched once, checked by hash whenever one is opened.

They hold the engine's source, real vocabularies, chat templates and upstream's own test suite. pip fetches
them, so that the user's package index, proxy and certificates apply.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llamahybrid.engine.storage import disk_errors, locked_build_dir, scratch
from llamahybrid.errors import EngineError


@dataclass(frozen=True)
class Pin:
    """A release of llama-cpp-python, identified by the hash of its sdist."""

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
"""The release that the test suite runs on, source of vocabularies and chat templates. An engine is built from
the installed release, if there are patches for it (`series.pin`)."""

# `pip download` asks the sdist's build backend for metadata, and installs a whole build environment to do so
# (most of a minute). Only the archive is needed, so this backend of the same name answers instead.
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
        EngineError: there is no home folder, as in some containers, or the override names an unknown user.
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
    if found.parts[:1] == ("~",):  # older platformdirs
        raise EngineError(homeless)
    return found


@disk_errors()
def fetch(pin: Pin | None = None) -> Path:
    """The verified archive of a release (None: `PIN`); downloaded with pip if missing or damaged.

    Raises:
        EngineError: pip failed, the download has another hash, or the disk refuses.
    """
    pin = pin or PIN
    path = cache_dir() / "sdist" / pin.archive
    if _is_there(path, pin):
        return path
    with locked_build_dir(path) as folder:
        if _is_there(path, pin):  # another process fetched it
            return path
        got = download(folder, pin)
        if sha256(got) != pin.sha256:
            raise EngineError(
                f"{pin.archive} from the package index does not have sha256 {pin.sha256}; "
                "check the index that pip is configured to use (`pip config list`)"
            )
        os.replace(got, path)
    return path


@disk_errors()
def member(name: str) -> Path:
    """Extract one file of the pinned sdist, ``vendor/llama.cpp/include/llama.h`` say, into the cache.

    Raises:
        EngineError: the sdist is unavailable.
    """
    path = cache_dir() / "sdist" / PIN.sha256[:16] / name
    if not path.is_file():
        with _opened(fetch()) as archive, scratch(path.parent) as folder:
            archive.extract(f"{PIN.folder}/{name}", folder)
            os.replace(folder / PIN.folder / name, path)
    return path


@disk_errors()
def unpack(dest: Path, pin: Pin | None = None) -> Path:
    """Extract a whole sdist (None: of `PIN`) to the new folder `dest`, without the archive's top folder.

    Raises:
        EngineError: the sdist is unavailable or invalid.
    """
    pin = pin or PIN
    path = fetch(pin)
    with scratch(dest.absolute().parent) as folder:
        try:
            with _opened(path) as archive:
                names = [PurePosixPath(name) for name in archive.getnames()]
                if any(name.is_absolute() or ".." in name.parts for name in names):
                    raise tarfile.TarError("it has files outside of its folder")
                archive.extractall(folder)
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise EngineError(f"{path} cannot be unpacked: {error}") from error
        if not (folder / pin.folder).is_dir():
            raise EngineError(f"{path} is no sdist of llama-cpp-python {pin.version}: no {pin.folder} in it")
        os.replace(folder / pin.folder, dest)
    return dest


def _opened(path: Path) -> tarfile.TarFile:
    archive = tarfile.open(path)  # noqa: SIM115 (the caller closes it)
    # Python < 3.10.12 has no filter; there, only archives of a known hash are unpacked (`rebase`)
    archive.extraction_filter = getattr(tarfile, "data_filter", lambda info, _: info)
    return archive


def download(folder: Path, pin: Pin) -> Path:
    """Let pip download an archive into `folder`; without a sha256 any content is accepted.

    Raises:
        EngineError: pip failed.
    """
    backend = folder / "backend" / "scikit_build_core"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build.py").write_text(_BACKEND.format(version=pin.version))
    pinned = folder / "requirements.txt"
    known = f" --hash=sha256:{pin.sha256}" if pin.sha256 else ""
    pinned.write_text(f"llama-cpp-python=={pin.version}{known}\n")
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


def sha256(path: Path) -> str:
    """The hash of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _is_there(path: Path, pin: Pin) -> bool:
    return path.is_file() and sha256(path) == pin.sha256
