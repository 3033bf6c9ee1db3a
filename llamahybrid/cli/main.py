"""The command line. Commands import their modules when they run, so that `--help` is instant."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from llamahybrid.children import ended_in_order
from llamahybrid.cli.cache import cache
from llamahybrid.cli.console import ctrl_c_kept, errors_shown
from llamahybrid.cli.engine import engine
from llamahybrid.cli.harness import Model, bench, check, hazards
from llamahybrid.cli.record import record, replay
from llamahybrid.cli.report import compare, report

MOST_TOKENS = 2**31 - 1
"""Largest context: llama.cpp's positions have 32 bits."""

app = typer.Typer(no_args_is_help=True, add_completion=False)

app.add_typer(engine, name="engine")
app.add_typer(cache, name="cache")
app.command()(bench)
app.command()(report)
app.command()(compare)
app.command()(check)
app.command()(hazards)
app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(record)
app.command()(replay)


def _versions(asked: bool) -> None:
    if asked:
        from llamahybrid.engine import bindings

        for package in ("llamahybrid", "llama-cpp-python"):
            typer.echo(f"{package} {bindings.version(package) or 'is not installed'}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_versions, is_eager=True, help="show versions, and exit")
    ] = False,
) -> None:
    """Prefix reuse for hybrid, recurrent and sliding-window models in llama-cpp-python."""


def _count(text: str | None) -> int | None:
    """Parse a number with an optional K, M or G, as in 100M."""
    if text is None:
        return None
    unit = {"K": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:].upper(), 1)
    with suppress(ValueError, OverflowError):
        if (count := int(float(text if unit == 1 else text[:-1]) * unit)) > 0:
            return count
    raise typer.BadParameter(f"{text!r} is not a number like 500K, 100M or 1G")


@app.command()
def tiny(
    arch: Annotated[str | None, typer.Argument(help="architecture, as llama.cpp names it")] = None,
    out: Annotated[Path | None, typer.Argument(dir_okay=False, help="GGUF file to write")] = None,
    vocab: Annotated[str, typer.Option(help="tiny, qwen35, llama-spm or bert-bge")] = "tiny",
    layers: Annotated[int | None, typer.Option(min=1, help="number of layers")] = None,
    embd: Annotated[int | None, typer.Option(min=1, help="width")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="attention heads")] = None,
    params: Annotated[str | None, typer.Option(help="about this many weights, e.g. 100M")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="sliding window in tokens")] = None,
    context: Annotated[int, typer.Option(min=1, help="context length in the metadata")] = 65536,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    list_: Annotated[bool, typer.Option("--list", help="list the architectures")] = False,
) -> None:
    """Write a random-weight model of any architecture; the same arguments give the same bytes."""
    from llamahybrid import tiny as models

    if list_:
        typer.echo("\n".join(models.architectures()))
        for name, reason in models.impossible().items():
            typer.echo(f"{name}: cannot be made: {reason}")
        return
    if arch is None or out is None:
        raise typer.BadParameter("give an architecture and a file to write, or --list")
    if vocab not in models.VOCABULARIES:
        raise typer.BadParameter(f"--vocab is one of {', '.join(models.VOCABULARIES)}")
    sizes: dict[str, Any] = dict(layers=layers, embd=embd, heads=heads, window=window, params=_count(params))
    with errors_shown(ValueError, OSError):
        path = models.make(arch, out, vocab=vocab, **sizes, context=context, seed=seed)
    typer.echo(f"{path}: {path.stat().st_size:,} bytes")


@app.command()
def chat(
    model: Model,
    system: Annotated[str, typer.Option(help="system prompt")] = "",
    n_ctx: Annotated[int, typer.Option(min=64, max=MOST_TOKENS, help="context length")] = 8192,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer")] = 512,
    keep_thinking: Annotated[bool, typer.Option(help="send thinking back with the history")] = False,
    keep: Annotated[bool, typer.Option(help="store on disk, too, so that later starts continue")] = False,
    draft: Annotated[int, typer.Option(min=0, help="tokens to draft from the text so far")] = 0,
    n_gpu_layers: Annotated[
        int | None, typer.Option(help="layers on the GPU; -1: all, as with --rpc by default")
    ] = None,
    rpc: Annotated[
        str | None, typer.Option(metavar="HOST:PORT,...", help="RPC servers that hold layers, too")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: upstream's")] = None,
) -> None:
    """Chat in the terminal; a line after each turn has the cached and decoded tokens."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    from rich.console import Console

    from llamahybrid.cli.chat import TerminalChat
    from llamahybrid.configuration import default_folder
    from llamahybrid.llama import Llama
    from llamahybrid.prompt_cache import PromptCache

    if sys.stdin is None:
        typer.echo("error: standard input is closed, so there is nothing to answer", err=True)
        raise typer.Exit(1)
    options: dict[str, Any] = {
        "n_gpu_layers": (-1 if rpc else 0) if n_gpu_layers is None else n_gpu_layers,
        "rpc_servers": rpc,
        "n_threads": threads,
        "n_threads_batch": threads,
        "draft_model": LlamaPromptLookupDecoding(num_pred_tokens=draft) if draft else None,
    }
    with errors_shown(ValueError, OSError):
        cache = PromptCache(disk_dir=default_folder() if keep else None)
        with ctrl_c_kept():
            llm = Llama(str(model), n_ctx=n_ctx, verbose=False, explain=True, prompt_cache=cache, **options)
        with closing(llm), ended_in_order():
            TerminalChat(llm, Console(), system, max_tokens, keep_thinking).run()


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def serve(context: typer.Context) -> None:
    """Serve models over HTTP, as llama_cpp.server does, several requests at once; see `serve --help`."""
    try:
        from llamahybrid.cli.serve import server
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "llama_cpp":
            raise  # another package of that name
        typer.echo(f"error: {error}; install llamahybrid[server]", err=True)
        raise typer.Exit(1) from error
    with errors_shown(ValueError, OSError), ctrl_c_kept():
        served = server(context.args)
    served.run()
    if not served.started:
        raise typer.Exit(1)


@app.command("rpc-server")
def rpc_server(
    host: Annotated[str, typer.Option(help="address of this machine to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen on")] = 50052,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; default: one for each core")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="folder for weights, so that they are sent once"),
    ] = None,
) -> None:
    """Lend this machine's GPUs, else its CPU, to a model on another (`chat --rpc`, `Llama(rpc_servers=...)`).

    Both sides need the same llama.cpp. The server handles one program at a time; others wait.
    """
    from ipaddress import ip_address

    from llamahybrid.devices import server

    with errors_shown():
        if not ip_address(server.address_of(host)).is_loopback:
            typer.echo(f"warning: {server.WARNING}", err=True)
        server.run(host, port, threads, keep)


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is a module, as for `python -m`")] = False,
    program: Annotated[list[str] | None, typer.Argument(help="a script, and its arguments")] = None,
) -> None:
    """Run a Python program written for llama_cpp with llamahybrid in its place.

    LLAMAHYBRID_RAM and LLAMAHYBRID_DISK ("2GiB", "0": none; for the disk also a folder) and
    LLAMAHYBRID_PARALLEL (requests at once) set the cache.
    """
    from llamahybrid.program import run as run_program

    raise typer.Exit(run_program([*(["-m"] if module else []), *(program or [])]))
