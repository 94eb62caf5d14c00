"""Scored groups as files and servers hold them: one reader, one writer, one HTML page of them.

Owns: which fields of a group are looked at, its sequences in parts; a group's row in a run's
rollouts, with its tokens; the page's data.
Never: where groups come from, what becomes of them, or how they are drawn.
"""
