"""`python -m vecsim`, and where the command `vecsim` starts."""

import sys


def main() -> None:
    """Run the command line and exit; Ctrl-C counts from the first import on."""
    try:
        from vecsim.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("vecsim: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
