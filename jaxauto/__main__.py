"""``python -m jaxauto``."""

import sys

from jaxauto.cli import main

if __name__ == "__main__":
    sys.exit(main())
