"""`python -m instrument` is the `instrument` command."""

import sys

from instrument.cli import main

if __name__ == "__main__":
    sys.exit(main())
