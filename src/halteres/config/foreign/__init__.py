"""Scripts of ours for environments written for atroposlib; they are run by the environment's own interpreter.

Owns: `describe.py` (what such a file's settings are), `launch.py` (running it with its figures in our metrics).
Never: imports anything of Halteres, which that interpreter need not have.
"""
