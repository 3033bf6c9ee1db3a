"""`make integrations`: packages that build on llama-cpp-python, each tested in an environment of its own.

    python -m tests.integrations.environments [NAME ...]

An environment holds the package at a pinned version, with whatever it asks for, the pinned llama-cpp-python
(built once since `make venv`) and what llamahybrid depends on; llamahybrid itself is this checkout.
They lie in the cache folder and are made once, anew when a pin changes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import venv
from importlib import metadata
from pathlib import Path

from llamahybrid.engine import sdist
from llamahybrid.engine.recipe import Recipe

ROOT = Path(__file__).parents[2]

SERVER = ("llama-cpp-python[server]==0.3.36", "prometheus-client>=0.20", "httpx>=0.27")
"""Packages of our server and of its client."""

PACKAGES: dict[str, tuple[str, ...]] = {
    "guidance": ("guidance==0.3.1",),
    "haystack": ("llama-cpp-haystack==3.0.2",),
    "instructor": ("instructor==1.17.0",),
    "langchain": ("langchain-community==0.4.2",),
    "litellm_client": ("litellm==1.106.2", "mcp", *SERVER),
    "llama_index": ("llama-index-llms-llama-cpp==0.7.0",),
    "llm": ("llm-llama-cpp==0.3", "llm"),
    "llama_cpp_server": ("llama-cpp-python[server]==0.3.36", "openai"),
    "outlines": ("outlines==1.3.3", "numba"),
    "page": ("playwright==1.65.2", *SERVER),
    "ray": ("ray[serve]==2.60.0", *SERVER),
    "schemathesis": ("schemathesis==4.32.5", *SERVER),
}
"""Environment -> what is installed there; tests/integrations/test_NAME.py is what runs in it."""

ALWAYS = ("pytest>=8", "pytest-timeout>=2.3")


def dependencies() -> list[str]:
    """Return llamahybrid's dependencies without the engine."""
    needs = (need for need in metadata.requires("llamahybrid") or () if "extra ==" not in need)
    return [need for need in needs if not need.startswith("llama-cpp-python")]


def interpreter(home: Path) -> Path:
    """The Python of an environment."""
    return home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def make(name: str, folder: Path) -> Path:
    """The environment of a package, made unless it is there as it should be; its Python."""
    home = folder / name
    python, stamp = interpreter(home), home / "pins.txt"
    engine = f"llama-cpp-python @ {sdist.fetch().as_uri()}"
    wanted = [engine, *dependencies(), *ALWAYS, *PACKAGES[name]]
    if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == "\n".join(wanted)):
        venv.create(home, clear=True, with_pip=True)
        command = [python, "-m", "pip", "install", "--quiet", "--cache-dir", str(Recipe.here().pip_cache)]
        subprocess.run([*command, *wanted], check=True)
        stamp.write_text("\n".join(wanted), encoding="utf-8")
    return python


def main() -> int:
    """Make what is missing, run the tests; 1 if any failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PACKAGES)}")
    parser.add_argument("--folder", type=Path, default=sdist.cache_dir() / "integrations")
    parser.add_argument("--make-only", action="store_true", help="run nothing")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(PACKAGES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    failed = []
    for name in asked.names or PACKAGES:
        clock = time.monotonic()
        python = make(name, asked.folder)
        print(f"{name}: environment after {time.monotonic() - clock:.0f} s", flush=True)
        if asked.make_only:
            continue
        tests = ROOT / "tests" / "integrations" / f"test_{name}.py"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "LLAMAHYBRID_INTEGRATION": name}
        if subprocess.run([python, "-m", "pytest", "-q", tests], cwd=ROOT, env=env).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
