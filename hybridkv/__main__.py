"""The command line as `python -m hybridkv`."""

import sys

from hybridkv.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
