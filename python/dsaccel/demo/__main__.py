"""``python -m dsaccel.demo``."""

import sys

from dsaccel.demo.main import main

# Guarded, because the processes of the comparison import this module again.
if __name__ == "__main__":
    sys.exit(main())
