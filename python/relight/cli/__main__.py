"""`python -m relight.cli`: the same as `relight`."""

from relight.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
