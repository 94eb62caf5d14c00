"""Training runs: the order of their requests, what each asks of the engine, and how an adapter comes back."""
