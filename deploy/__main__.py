"""`python -m deploy` runs `tandem`."""

import sys

from deploy.cli import main

if __name__ == "__main__":
    sys.exit(main())
