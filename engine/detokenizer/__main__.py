"""`python -m engine.detokenizer`: see engine/detokenizer/process.py."""

import sys

from engine.detokenizer.process import main

if __name__ == "__main__":
    sys.exit(main())
