"""``llamahybrid engine build|list|doctor``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from llamahybrid.cli.console import errors_shown

engine = typer.Typer(
    no_args_is_help=True, help="Build and list patched llama.cpp libraries; diagnose the loaded one."
)


@engine.command()
def build(
    force: Annotated[bool, typer.Option("--force", help="build even if it exists")] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="build this checkout of llama-cpp-python or llama.cpp",
        ),
    ] = None,
    hardening: Annotated[
        bool, typer.Option("--hardening", help="add the patches that llamahybrid itself does not need")
    ] = False,
    cuda: Annotated[bool, typer.Option("--cuda", help="for NVIDIA GPUs; finds toolkit and cuBLAS")] = False,
    cuda_arch: Annotated[
        str | None,
        typer.Option(metavar="CC", help="compute capability, as 90; default: of this machine's GPU"),
    ] = None,
) -> None:
    """Build the patched engine (minutes; CMAKE_ARGS works as usual) and print the folder of its libraries."""
    from llamahybrid.engine import choice, patched
    from llamahybrid.engine import cuda as nvidia
    from llamahybrid.engine.process import display

    if source is not None and hardening:
        raise typer.BadParameter("--source is built as it is: no patches are applied")
    site = choice.InstalledBindings.here()
    if cuda or cuda_arch:
        with errors_shown():
            options = nvidia.cmake_args(cuda_arch)
        # as if set by the user, so that they are part of the engine's key
        os.environ["CMAKE_ARGS"] = f"{options} {os.environ.get('CMAKE_ARGS', '')}".strip()
    if source is None and (reason := choice.build_warning(site)):
        typer.echo(f"note: {reason}", err=True)
    with errors_shown():
        try:
            with display() as progress:
                built = patched.make(progress, force=force, source=source, hardening=hardening)
        except KeyboardInterrupt:
            typer.echo("interrupted: nothing was kept of the build; start it again any time", err=True)
            raise typer.Exit(130) from None
        reason = choice.mismatch(built, site)
    if reason:
        typer.echo(f"`import llamahybrid` does not take it by itself: {reason}", err=True)
    typer.echo(os.fsencode(built.libraries))  # for $(...), whatever the bytes of the name


@engine.command("list")
def list_() -> None:
    """List the built engines, latest first; a star marks the one that `import llamahybrid` loads."""
    from llamahybrid.engine import choice, installed, series

    engines = installed.engines()
    if not engines:
        typer.echo("no engine was built; `llamahybrid engine build` makes the patched one")
    with errors_shown():
        site = choice.InstalledBindings.here()
        reasons = [choice.mismatch(built, site) for built in engines]
    best = next((built for built, reason in zip(engines, reasons, strict=True) if not reason), None)
    for built, reason in zip(engines, reasons, strict=True):
        sets = ", ".join(dict.fromkeys(map(series.set_of, built.patches)))
        made = f"from {built.source}" if built.source else f"{len(built.patches)} patches ({sets})"
        options = "".join(f", {name}={value}" for name, value in built.recipe.options)
        typer.echo(f"{'*' if built is best else ' '} {built.libraries}")
        typer.echo(f"    llama-cpp-python {built.version}, {made}{options}, {built.built}")
        if reason:
            typer.echo(f"    not taken by itself: {reason}")
    for problem in installed.unreadable():
        typer.echo(f"  {problem}: remove the folder")


@engine.command()
def doctor() -> None:
    """Show the loaded engine, its functions and backends, and advice."""
    from llamahybrid.capi import shim
    from llamahybrid.devices import ggml
    from llamahybrid.engine.doctor import examine

    with errors_shown():
        findings = examine(lambda: shim.library().optional, shim.available, ggml.gpus)
    for finding in findings:
        typer.echo(f"{finding.topic:20}{finding.text}")
        if finding.advice:
            typer.echo(f"{'':20}-> {finding.advice}")
