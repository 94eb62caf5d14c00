"""The tools over HTTP: the seed's routes, /api/tools, and what is mounted beside them."""
