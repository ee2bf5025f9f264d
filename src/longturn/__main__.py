"""`longturn` and `python -m longturn`: the command line."""

import sys

from longturn.cli import interrupts


def main() -> int:
    """Run the command line with this process's arguments. Returns the exit code."""
    interrupts.leave_at_once()
    from longturn.cli.main import main as run  # now, since Ctrl-C is heard

    return run()


if __name__ == "__main__":
    sys.exit(main())
