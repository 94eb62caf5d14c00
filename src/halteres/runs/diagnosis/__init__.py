"""Diagnosis: what is wrong with a run that has not failed.

Owns: the rules, each with its thresholds and its remedy; that what lasts is reported once.
Never: writes (the supervisor does), changes a run, reads a metric's history from anywhere but the rows it is given.
"""

from halteres.runs.diagnosis.diagnosis import HEARTBEAT_S, REFUSED, Diagnosis, stalled

__all__ = ["HEARTBEAT_S", "REFUSED", "Diagnosis", "stalled"]
