"""`python -m halteres.environments FILE VERB …`: `python FILE VERB …`, and a sentence for a file
that cannot be run.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from halteres.environments.commands import author_error


def main() -> None:
    """Run the file named first, with the arguments after it."""
    if len(sys.argv) < 2:
        sys.stderr.write(
            "error: Name an environment file. usage: python -m halteres.environments FILE VERB …\n"
        )
        sys.exit(2)
    file = Path(sys.argv[1]).absolute()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(file.parent)  # as `python FILE` does
    try:
        runpy.run_path(str(file), run_name="__main__")
    except Exception as error:  # noqa: BLE001 - any file can be named; its failure is the answer
        sys.exit(f"error: {' '.join(author_error(file, 'be run', error).sentence.split())}")


if __name__ == "__main__":
    main()
