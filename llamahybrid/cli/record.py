"""``llamahybrid record`` and ``llamahybrid replay``: requests of a running program, played again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from llamahybrid.cli.console import errors_shown
from llamahybrid.cli.harness import Json, Lib, Models, On, finish, running, so_far
from llamahybrid.files import open_alone


def record(
    program: Annotated[
        list[str] | None, typer.Argument(help="PROGRAM and its arguments, or -m MODULE; after --")
    ] = None,
    out: Annotated[Path, typer.Option(help="file to write, a line a request")] = Path("trace.jsonl"),
    hash_: Annotated[
        bool, typer.Option("--hash", help="hide what was said; keep where prompts part")
    ] = False,
    proxy: Annotated[str | None, typer.Option(help="URL of a server to stand before")] = None,
    port: Annotated[int, typer.Option(help="where the proxy listens; 0: any free one")] = 8081,
    host: Annotated[str, typer.Option(help="the address it listens on")] = "127.0.0.1",
) -> None:
    """Record the requests of a Python program, or (--proxy) of a server's clients.

    `llamahybrid record -- PROGRAM ...` runs it with llamahybrid in llama_cpp's place, as `llamahybrid run`.
    A trace holds what was said, unless --hash hides it.
    """
    if (proxy is None) == (not program):
        raise typer.BadParameter("give `-- PROGRAM ...`, or --proxy URL")
    if proxy is None:
        raise typer.Exit(_run(program or (), out, hash_))
    with errors_shown(OSError):
        from llamahybrid.harness.traces.hashing import Hasher
        from llamahybrid.harness.traces.proxy import RecordingProxy
        from llamahybrid.harness.traces.trace import TraceWriter

        writer = TraceWriter(out, f"proxy before {proxy}", Hasher() if hash_ else None)
        before = RecordingProxy(proxy, writer, port, host)
    typer.echo(f"recording to {out}: clients ask {before.url}, Ctrl-C ends", err=True)
    try:
        before.serve()
    except KeyboardInterrupt:
        pass
    finally:
        writer.close()


def _run(program: Sequence[str], out: Path, hashed: bool) -> int:
    """Run it with the hook in place; its exit status."""
    from llamahybrid.program import run  # and nothing that imports llama_cpp: the program does

    path, process, begun = out.absolute(), os.getpid(), False
    before = path.exists()
    with errors_shown(OSError):
        open_alone(path).close()  # before the program runs: its first model may come late

    def recording() -> None:
        nonlocal begun
        from llamahybrid.harness.traces.hook import record_into

        record_into(path, hashed)
        begun = True

    try:
        return run(program, recording)
    finally:
        if not begun and os.getpid() == process:  # not in a child that the program forked
            if not before:
                path.unlink(missing_ok=True)
            typer.echo(f"nothing was recorded: {program[0]} has not imported llama_cpp", err=True)


def replay(
    trace: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="of `llamahybrid record`")],
    on: On,
    model: Models = None,
    lib: Lib = None,
    json: Json = None,
    n_ctx: Annotated[int | None, typer.Option(min=64, help="default: what the trace needs")] = None,
) -> None:
    """Play recorded requests on each target; per request what was reused, and why what was not.

    Targets that open a model need --model: token ids of another one mean nothing.
    """
    from llamahybrid.harness.check import models
    from llamahybrid.harness.targets import choice
    from llamahybrid.harness.traces.replay import Replay

    with running(json) as told:
        targets = choice.targets(on, lib)
        if not model and any(each.needs_model for each in targets):
            raise ValueError("give --model, the one that the trace was recorded on")
        with models(model or (), make=False) as files:
            report = Replay(targets, files, trace, n_ctx, progress=told, found=so_far(json)).run()
    finish(report, json)
