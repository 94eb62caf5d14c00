"""The link between the service and its engine's process: frames on a Unix socket, and both of its ends."""
