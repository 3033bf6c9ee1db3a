"""``python -m llamahybrid.engine wheel|sdist``: build the pinned wheel or fetch the sdist; print its path.

Runs before anything else is installed: it needs the standard library, platformdirs, filelock and rich.
"""

from __future__ import annotations

import argparse
import sys

from llamahybrid.engine import build, sdist
from llamahybrid.engine.process import display
from llamahybrid.errors import EngineError


def main() -> int:
    """Print the path, building first if needed; progress goes to stderr."""
    parser = argparse.ArgumentParser(prog="python -m llamahybrid.engine", description=__doc__)
    parser.add_argument("what", choices=("wheel", "sdist"))
    what = parser.parse_args().what
    try:
        if what == "sdist":
            print(sdist.fetch())
        else:
            with display() as progress:
                wheel = build.wheel(progress)
            print(wheel)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was kept of the build; start it again any time", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
