"""The `kvfold` command: thin commands over the public API."""

import sys

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def main() -> None:
    """Run the command line, `sys.argv`.

    What a user can mend is one line on stderr, with exit status 1, or 2 if the arguments are not understood. A fault of
    kvfold's own is one line, too, that says so; with KVFOLD_TRACEBACK=1 every error comes with its traceback.
    """
    try:
        from kvfold.cli.errors import run  # what it imports takes seconds, in which Ctrl-C is heard already

        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
