"""What `engine rebase` tells: what became of each patch, which tests are about it, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llamahybrid.engine.rebase import Carried


def show(carried: Sequence[Carried], name: str, base: str, folder: Path | None, tree: Path | None) -> None:
    """Print it; `folder` holds the patches that were written, `tree` the git tree that was kept, if any."""
    # names are whole in 80 columns: they are typed again
    table = Table(title=f"the patches for {base} on {name}", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("patch", no_wrap=True)
    table.add_column("outcome; what tells whether it cures", overflow="fold")
    for patch in carried:
        asked = [escape(test) for test in tests(patch.name)] if patch.text else []
        told = "\n".join([escape(patch.outcome), *(f"[dim]{test}[/]" for test in asked)])
        table.add_row(patch.name.removesuffix(".patch"), told)
    Console().print(table)
    done = sum(bool(patch.text) and not patch.missing for patch in carried)
    typer.echo(f"{done} of {len(carried)} merged; what merges need not compile, nor do what it should")
    left = [patch for patch in carried if patch.conflicts]
    if tree and left:
        picks = "; ".join(f"git cherry-pick {patch.name.removesuffix('.patch')}" for patch in left)
        typer.echo(f"by hand, in this order: cd {tree}; {picks}")
    elif left:
        typer.echo("--tree FOLDER keeps a git tree to do the others in")
    if folder:
        typer.echo(
            f"{folder}: {sum(bool(patch.text) for patch in carried)} patches. With that release installed:\n"
            '  lib=$(llamahybrid engine build); llamahybrid hazards --lib "$lib"\n'
            '  LLAMAHYBRID_TEST_LIB="$lib" pytest tests/harness/hazards tests/patches'
        )


def tests(name: str) -> list[str]:
    """What is to be run for a patch: the hazards' ids, and the files of a checkout."""
    from llamahybrid.engine import series
    from llamahybrid.harness.hazards.catalogue import PROBES

    number = series.number(name)
    home = Path(__file__).parents[2] / "tests"
    files = sorted(file.relative_to(home.parent).as_posix() for file in home.glob(f"*/test_{number}_*.py"))
    return [*(probe.id for probe in PROBES if number in probe.patches), *files]
