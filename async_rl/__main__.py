"""`python -m async_rl`: the command `async-rl`."""

import sys

from async_rl.cli import main

sys.exit(main())
