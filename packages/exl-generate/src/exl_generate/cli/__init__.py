"""The `exl` command."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; errors made on purpose become one line on stderr and exit code 1, Ctrl-C exit code 130."""
    from exl_generate.cli.app import app

    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        code = getattr(error, "code", None)
        if not isinstance(code, str):
            raise
        print(f"exl: {error} [{code}]", file=sys.stderr)
        sys.exit(1)
