"""`python -m halteres.environments FILE VERB …`: run an environment file, and say in a sentence what is wrong with it.

Owns: the sentence for a file that cannot even be imported.
Never: does anything else that `python FILE VERB …` would not do.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from halteres.environments.commands import author_error


def main() -> None:
    """Run the file named first, with the arguments after it."""
    if len(sys.argv) < 2:
        sys.stderr.write("error: Name an environment file. usage: python -m halteres.environments FILE VERB …\n")
        sys.exit(2)
    file = Path(sys.argv[1]).absolute()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(file.parent)  # as `python FILE` does
    try:
        runpy.run_path(str(file), run_name="__main__")
    except Exception as error:  # noqa: BLE001 - any file can be named; its failure is the answer
        sys.stderr.write(f"error: {' '.join(author_error(file, 'be run', error).sentence.split())}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
