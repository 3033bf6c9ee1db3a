"""The command `llamahybrid`, and `python -m llamahybrid`.

`run` goes before the command line's own library is there: what the program raises, a KeyboardInterrupt, say,
ends as it would under Python, and nothing is on the stack or in `sys.excepthook` that was not its own.
"""

from __future__ import annotations

import errno
import sys
from traceback import walk_tb


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"] and sys.argv[2:3] != ["--help"]:
        from llamahybrid.program import run

        sys.exit(run(sys.argv[2:]))
    from llamahybrid.cli.main import app
    from llamahybrid.cli.streams import print_anything, require_descriptors
    from llamahybrid.errors import EngineError

    require_descriptors()
    print_anything()
    try:
        app()
    except EngineError as error:  # of LLAMAHYBRID_ENGINE, say, in whichever command imports llama_cpp
        sys.exit(f"error: {error}")
    except (ImportError, OSError, RuntimeError) as error:
        if _of_llama_cpp(error):
            sys.exit(f"error: llama_cpp cannot be imported: {error}; see `llamahybrid engine doctor`")
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            sys.exit(f"error: {error}")  # of what standard output goes to
        raise


def _of_llama_cpp(error: Exception) -> bool:
    """It is not there, has no library, or is another package of that name."""
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "llama_cpp":
        return True
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "llama_cpp.llama_cpp"
        for frame in frames
    )


if __name__ == "__main__":
    main()
