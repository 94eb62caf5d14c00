"""Diagnosis: what is wrong with a run that has not failed.

Owns: the rules, each with its thresholds and its remedy; that one excursion is told once.
Never: writes (the supervisor does), changes a run, reads a metric's history from anywhere but the rows it is given.

    case           what a run was started with; the calls an agent can make about it, as text
    excursion      a condition that lasts is told once; the trend of a series; the scale of the rewards
    learning       rules of what is learnt: no variance, no rise, entropy
    hacking        the rule of what is learnt wrongly: rewards rise, held-out answers do not
    drift          rules of rewards that are led to where they were not made for; which alerts may end a run
    flow           rules of how it is learnt: truncation, drift, starving and idling, NaN
    pulse          rules of the clock: nothing happens any more
    refused_calls  the rule of a start that comes to nothing: all that the environment asks is refused
    diagnosis      all rules together

Thresholds were set on runs of the built-in model (arithmetic, three seeds of 40 steps; figures beside each rule) and
are silent on a healthy run, the stretch included where every answer is right.
"""

from halteres.runs.diagnosis.diagnosis import Diagnosis
from halteres.runs.diagnosis.stall_detector import HEARTBEAT_S, stalled

__all__ = ["HEARTBEAT_S", "Diagnosis", "stalled"]
