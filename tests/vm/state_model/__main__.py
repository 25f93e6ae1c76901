"""`python -m tests.vm.state_model`: see `run`."""
import sys

from tests.vm.state_model.run import main

if __name__ == "__main__":
    sys.exit(main())
