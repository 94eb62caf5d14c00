"""Where each effective setting comes from."""

from halteres.config.projection import NOTHING_GIVEN, Effective, Source, Sources, resolved, wired

__all__ = ["NOTHING_GIVEN", "Effective", "Source", "Sources", "resolved", "wired"]
