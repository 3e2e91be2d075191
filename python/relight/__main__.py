"""`python -m relight`: the same as the command `relight`."""

from relight.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
