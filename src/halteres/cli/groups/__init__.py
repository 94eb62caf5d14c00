"""`halteres groups`: look at the groups on a trajectory server, write them to a file, post a file.

commands ──┬── viewing ────┬── terminal ──┬── words, parts
           │               └── page ──────┘ (page: surprise too)
           ├── exporting
           ├── said
           └── clients.trajectories.groups: asking, following, importing
"""

from halteres.cli.groups.commands import app

__all__ = ["app"]
