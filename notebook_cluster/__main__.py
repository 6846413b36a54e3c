"""``python -m notebook_cluster`` is the command ``notebook-cluster``."""

import sys

from notebook_cluster.cli import main

sys.exit(main())
