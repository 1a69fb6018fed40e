"""`python -m router` runs `tandem router`; an entry point may import upward."""

import sys

from deploy.cli import main

if __name__ == "__main__":
    sys.exit(main(["router", *sys.argv[1:]]))
