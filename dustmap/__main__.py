"""`python -m dustmap` is the command `dustmap`."""

import sys

from dustmap.cli import main

if __name__ == "__main__":
    sys.exit(main())
