"""The service's process: `python -m halteres.service --state DIR --port P --engine torch|scripted
...`.
"""

import sys

from halteres.service.server import main

if __name__ == "__main__":
    sys.exit(main())
