"""`python -m router`: the same as `tandem router`. The one allowed upward import: this file is an entry point."""

import sys

from deploy.cli import main

if __name__ == "__main__":
    sys.exit(main(["router", *sys.argv[1:]]))
