"""`python -m m3jit`."""
import sys

from m3jit.cli import main

sys.exit(main())
