"""`python -m trl_packing.cli` is `trl-packing`."""

import sys

from trl_packing.cli.program import main

sys.exit(main())
