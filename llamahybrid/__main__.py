"""The command `llamahybrid`, and `python -m llamahybrid`.

`run` goes before the command line's own library is there: what the program raises, a KeyboardInterrupt, say,
ends as it would under Python, and nothing is on the stack or in `sys.excepthook` that was not its own.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"] and sys.argv[2:3] != ["--help"]:
        from llamahybrid.program import run

        sys.exit(run(sys.argv[2:]))
    from llamahybrid.cli.main import app
    from llamahybrid.errors import EngineError

    try:
        app()
    except EngineError as error:  # of LLAMAHYBRID_ENGINE, say, in whichever command imports llama_cpp
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
