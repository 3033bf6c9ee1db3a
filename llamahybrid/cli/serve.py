"""`llamahybrid serve MODEL`: the options of `python -m llama_cpp.server` and ours."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from llama_cpp.server.cli import add_args_from_model, parse_model_from_args

from llamahybrid.server.app import create_app
from llamahybrid.server.log import configuration
from llamahybrid.server.serve import Server, require_free, server_of
from llamahybrid.server.settings import ModelSettings, ServerSettings, Settings, from_file, in_one_line


def parser() -> argparse.ArgumentParser:
    """The options, named after the settings; `--n-ctx` is the same as `--n_ctx`."""
    made = argparse.ArgumentParser(
        prog="llamahybrid serve",
        usage="llamahybrid serve [OPTION ...] [MODEL]; --help lists the options",
        description="Serve models over HTTP, as llama_cpp.server does, several requests at once.",
        epilog="Each option may be given in the environment, too, in capitals.",
    )
    made.add_argument("path", nargs="?", metavar="MODEL", help="GGUF file")
    made.add_argument(
        "--config_file", help="JSON or YAML file with all settings, as llama_cpp.server reads it."
    )
    add_args_from_model(made, Settings)
    for action in made._actions:  # argparse expands %
        action.help = action.help and action.help.replace("%", "%%")
    return made


def settings(arguments: Sequence[str]) -> tuple[ServerSettings, list[ModelSettings]]:
    """Parse the options, or the config file. Raises ValueError, OSError; SystemExit for unknown options."""
    named = parser()
    given = named.parse_args(_switched([_underscored(each) for each in arguments]))
    config = os.environ.get("CONFIG_FILE", given.config_file)
    if config:
        if given.path or given.model:
            raise ValueError("the config file names the models; leave out MODEL")
        return from_file(Path(config))
    if given.path and given.model:
        raise ValueError("two models were given: MODEL and --model")
    given.model = given.path or given.model
    with in_one_line():
        return parse_model_from_args(ServerSettings, given), [parse_model_from_args(ModelSettings, given)]


def server(arguments: Sequence[str]) -> Server:
    """A server for these options with its default model open, before uvicorn starts.

    Raises as `settings` and `Models.open`; ValueError if there is no model, OSError if the port is in use.
    """
    how, models = settings(arguments)
    app = create_app(server_settings=how, model_settings=models)
    made, service = server_of(app, log_config=configuration()), app.state.service
    require_free(made.config.host, made.config.port)
    service.models.open(service.models.default)
    return made


def _switched(arguments: list[str]) -> list[str]:
    """Add the value `true` to a switch without a value."""
    switch, words = "--ignore_unknown_fields", ("0", "1", "true", "false", "yes", "no", "on", "off")
    pairs = zip(arguments, [*arguments[1:], ""], strict=False)  # no pairs without arguments
    return [
        f"{name}=true" if name == switch and after.lower() not in words else name for name, after in pairs
    ]


def _underscored(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return (
        name.replace("-", "_").replace("__", "--", 1) + equals + value if name.startswith("--") else argument
    )
