"""Plants faults in the product, one at a time, and says which test shows each: the judge of the suite.

    python -m tests.lab.mutations [--only NAME] [--list] [--hints-only | --all-tests] [--workers N]

Each worker has a copy of the tree (what git tracks, and the compiled shim) in a temporary folder. A fault of
`planted_faults.txt` is applied there and the tests run that are named beside it; where they are green,
all that `make test` runs on that engine. A red test is run once more without the fault: one that is red all
the same shows nothing and is left out. Exit status 1 where no test shows a fault.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARKS = {"stock": "not full", "patched": "patched and not full"}
FOUND = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
CRASHED = re.compile(r'^  File ".*?/(tests/\S+)", line \d+ in (test_\w+)', re.MULTILINE)
LIMIT = 900.0
"""Seconds for one run of pytest."""


@dataclass(frozen=True)
class Fault:
    """Edits of one file, and where to look first for a test that shows them."""

    name: str
    """The fault in plain words."""
    file: str
    edits: tuple[tuple[str, str], ...]
    """(text that goes, text that comes), applied in order."""
    tests: tuple[str, ...]
    engine: str = "stock"
    hangs: bool = False
    """The product may wait for ever: a test that does not end shows it, too."""


def faults_in(text: str) -> Iterator[Fault]:
    """The faults of a text of the form of `planted_faults.txt`."""
    kind, fault = Fault("", "", (), ()), None
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for sign, group in groupby(lines, lambda line: line[:2] if line[:2] in ("- ", "+ ") else line):
        said = "\n".join(line[2:] for line in group)
        if sign == "- " and fault is not None:
            fault = replace(fault, edits=(*fault.edits, (said, "")))
        elif sign == "+ " and fault is not None:
            fault = replace(fault, edits=(*fault.edits[:-1], (fault.edits[-1][0], said)))
        else:
            if fault is not None:
                yield fault
            fault = None
            if sign.startswith("["):
                file, _, rest = sign[1:].partition("] ")
                words = rest.split()
                tests = tuple(word for word in words if "/" in word)
                engine = "patched" if "patched" in words else "stock"
                kind = Fault("", f"llamahybrid/{file}", (), tests, engine, "hangs" in words)
            else:
                fault = replace(kind, name=sign)
    if fault is not None:
        yield fault


@dataclass(frozen=True)
class Run:
    """Result of a run of pytest."""

    red: bool
    test: str = ""
    """The first test that was red."""
    late: bool = False
    """The run did not end in time."""


@dataclass(frozen=True)
class Result:
    """The suite's result for a fault."""

    name: str
    outcome: str
    """red, GREEN or timeout"""
    test: str
    hinted: bool
    """The tests named beside the fault showed it."""
    seconds: float

    def __str__(self) -> str:
        star = "" if self.hinted else " *"
        return f"{self.outcome:8} {self.seconds:6.1f} s  {self.name}: {self.test or 'no test'}{star}"


@dataclass
class Healthy:
    """Tests that are red without any fault, which several workers learn of."""

    red: set[str] = field(default_factory=set)
    green: set[str] = field(default_factory=set)


class Copy:
    """A copy of a tree, in which one fault after the other is planted."""

    def __init__(self, tree: Path, folder: Path, lib: str, healthy: Healthy) -> None:
        """`lib`: the patched libllama."""
        self._folder = folder
        self._lib = lib
        self._healthy = healthy
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=tree, check=True, capture_output=True, text=True
        )
        shims = (str(path.relative_to(tree)) for path in tree.glob("llamahybrid/_shim.*"))
        for name in (*filter(None, listed.stdout.split("\0")), *shims):
            if (tree / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, folder / name)
        subprocess.run("git init -q && git add -A", cwd=folder, shell=True, check=True)  # some tests ask git

    def judge(self, fault: Fault, hints: bool = True, rest: bool = True) -> Result:
        """Plant a fault and run the tests beside it (`hints`), then the `rest`; the copy is sound again."""
        began = time.monotonic()
        path = self._folder / fault.file
        sound = path.read_text(encoding="utf-8")
        run, hinted = Run(False), True
        there = (test for test in fault.tests if (self._folder / test.partition("::")[0]).exists())
        for tests in [*([test] for test in there if hints), *([[]] if rest else [])]:
            run, hinted = self._shown(fault, path, sound, tests), bool(tests)
            if run.red or run.late:
                break
        late = run.late and not fault.hangs
        outcome = "timeout" if late else "red" if run.red or run.late else "GREEN"
        return Result(fault.name, outcome, run.test, hinted, round(time.monotonic() - began, 1))

    def _shown(self, fault: Fault, path: Path, sound: str, tests: Sequence[str]) -> Run:
        """The first test that is red with the fault and green without it."""
        while True:
            path.write_text(planted(fault, sound), encoding="utf-8")
            try:
                run = self._pytest(fault, tests)
            finally:
                path.write_text(sound, encoding="utf-8")
            if not run.red or not run.test or run.test in self._healthy.green:
                return run
            if not self._pytest(fault, [run.test]).red:
                self._healthy.green.add(run.test)
                return run
            if run.test in self._healthy.red:
                raise RuntimeError(f"{run.test} is red without a fault and cannot be left out")
            print(f"(red without a fault, and left out: {run.test})", flush=True)
            self._healthy.red.add(run.test)

    def _pytest(self, fault: Fault, tests: Sequence[str]) -> Run:
        left_out = [word for test in sorted(self._healthy.red) for word in ("--deselect", test)]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "--tb=no"]
        command += ["-m", MARKS[fault.engine], "--timeout", str(int(LIMIT / 4)), *left_out, *tests]
        if not tests:
            command += ["-n", "2", "--dist", "loadgroup"]
        engine = self._lib if fault.engine == "patched" else "stock"
        variables = {"PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        variables["LLAMAHYBRID_ENGINE"] = engine
        if fault.engine == "patched":
            variables["LLAMAHYBRID_TEST_LIB"] = engine
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                return Run(False, "the run did not end", late=True)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            said = output.read()
        if code in (0, 5):  # 5: none of these tests is for this engine
            return Run(False)
        if code < 0 or code > 5:
            crashed = CRASHED.search(said)
            return Run(True, "::".join(crashed.groups()) if crashed else f"the process died ({code})")
        found = FOUND.search(said)
        if found is None:
            raise RuntimeError(f"pytest ended with {code}:\n{said[-2000:]}")
        late = "Timeout (>" in said or "Failed: Timeout" in said
        return Run(not late or fault.hangs, found.group(1), late)


def planted(fault: Fault, sound: str) -> str:
    """Return a file's text with a fault planted. Raises ValueError unless the old text is there once."""
    text = sound
    for old, new in fault.edits:
        if (count := text.count(old)) != 1:
            raise ValueError(f"{fault.name!r}: {count} times in {fault.file}: {old!r}")
        text = text.replace(old, new)
    if text == sound:
        raise ValueError(f"{fault.name!r} changes nothing")
    return text


def judge_all(faults: Sequence[Fault], lib: str, workers: int, hints: bool, rest: bool) -> list[Result]:
    """The results of faults in their order, each told as it comes."""
    for fault in faults:
        planted(fault, (ROOT / fault.file).read_text(encoding="utf-8"))
    healthy, idle = Healthy(), queue.SimpleQueue[Copy]()

    def judged(fault: Fault) -> Result:
        copy = idle.get()
        try:
            result = copy.judge(fault, hints, rest)
        finally:
            idle.put(copy)
        print(result, flush=True)
        return result

    with (
        tempfile.TemporaryDirectory(prefix="llamahybrid-faults-") as scratch,
        ThreadPoolExecutor(workers) as pool,
    ):
        for number in range(workers):
            (folder := Path(scratch, str(number))).mkdir()
            idle.put(Copy(ROOT, folder, lib, healthy))
        try:
            return list(pool.map(judged, faults))
        finally:
            pool.shutdown(cancel_futures=True)


def _patched_lib() -> str:
    """The patched libllama of this tree, which is built if need be."""
    command = [sys.executable, "-m", "llamahybrid", "engine", "build"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LLAMAHYBRID_ENGINE": "stock"}
    return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.mutations", description=__doc__)
    parser.add_argument("--only", action="append", help="faults whose name or file has this; repeatable")
    parser.add_argument("--list", action="store_true", help="name the faults, and run nothing")
    parser.add_argument("--hints-only", action="store_true", help="run the tests beside a fault alone")
    parser.add_argument("--all-tests", action="store_true", help="run the whole suite at once")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    every = faults_in((ROOT / "tests/lab/planted_faults.txt").read_text(encoding="utf-8"))
    faults = [f for f in every if not given.only or any(o in f.name or o in f.file for o in given.only)]
    if given.list:
        for fault in faults:
            print(f"{fault.name}\n    {fault.file} ({fault.engine}): {' '.join(fault.tests)}")
        return 0
    lib = os.environ.get("LLAMAHYBRID_TEST_LIB", "")
    if not lib and any(fault.engine == "patched" for fault in faults):
        lib = _patched_lib()
    results = judge_all(faults, lib, given.workers, not given.all_tests, not given.hints_only)
    print("\nin the order of the list; *: the test is not beside its fault", *results, sep="\n")
    shown = sum(each.outcome == "red" for each in results)
    print(f"{shown} of {len(results)} faults are shown by a test")
    return 0 if shown == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
