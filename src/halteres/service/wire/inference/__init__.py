"""JSON bodies of inference: a struct per request, in the shape of whoever invented it."""
