"""The command `llamahybrid`, and `python -m llamahybrid`.

`run` bypasses the command line's library, so that exceptions of the program, KeyboardInterrupt among them,
are handled as under plain Python, with its own stack and `sys.excepthook`.
"""

from __future__ import annotations

import os
import sys
from traceback import walk_tb


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"] and sys.argv[2:3] != ["--help"]:
        from llamahybrid.program import run

        sys.exit(run(sys.argv[2:]))
    from llamahybrid.errors import DISK_FULL, EngineError

    try:
        from llamahybrid.cli.console import prepare_streams
        from llamahybrid.cli.main import app

        prepare_streams()
        app()
    except KeyboardInterrupt:  # while the commands are imported
        sys.exit(130)
    except EngineError as error:  # invalid LLAMAHYBRID_ENGINE, in any command that imports llama_cpp
        sys.exit(f"error: {error}")
    except (ImportError, OSError, RuntimeError) as error:
        if _of_llama_cpp(error):
            sys.exit(f"error: llama_cpp cannot be imported: {error}; see `llamahybrid engine doctor`")
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            # the disk of a redirected standard output, which the interpreter would flush again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(f"error: {error}")
        raise


def _of_llama_cpp(error: Exception) -> bool:
    """Tell whether the import of llama_cpp failed: missing, without a library, or another package."""
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "llama_cpp":
        return True
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "llama_cpp.llama_cpp"
        for frame in frames
    )


if __name__ == "__main__":
    main()
