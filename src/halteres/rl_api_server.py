"""`uvicorn halteres.rl_api_server:app --port 8080`: the control server under the name that the seed's client tells.

Owns: the name. `halteres serve control` starts the same app, and ends waiting calls in order.
Never: serves another machine, whatever address uvicorn is given.
"""

from __future__ import annotations

from halteres.agent.faces.http.app import create_app

app = create_app()
