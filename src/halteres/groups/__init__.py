"""Scored groups as files and servers hold them: one reader, and one HTML page of them.

Owns: which fields of a group are looked at, its sequences in parts, how likely tokens were; the
page.
Never: where groups come from, or what becomes of them.
"""
