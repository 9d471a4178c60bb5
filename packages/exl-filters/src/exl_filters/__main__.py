"""`python -m exl_filters`."""

import sys

from exl_filters.cli import main

sys.exit(main())
