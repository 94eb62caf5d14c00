"""`halteres groups`: look at the groups on a trajectory server, write them to a file, post a file.

commands ──┬── view (a terminal)
           ├── page (an HTML file)
           └── transfer (export, import)
"""

from halteres.cli.groups.commands import app

__all__ = ["app"]
