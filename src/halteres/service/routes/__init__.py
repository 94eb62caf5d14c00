"""Routes of the Tinker API by subject: each takes a request apart, asks a part of the service, and
shapes the answer.

Owns: paths and methods, the guard before all of them.
Never: keeps anything.
"""
