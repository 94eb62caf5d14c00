"""Everything between the socket and the service."""
