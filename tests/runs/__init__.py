"""Tests of the run directory and its supervisor: real supervisors, real processes."""
