"""An engine without weights, for tests of everything around an engine."""
