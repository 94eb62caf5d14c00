"""The Tinker API's bodies, both ways; the schema is `tinker_public.proto`, which says how to
regenerate the code.

Owns: one struct per body, protobuf and JSON of every generation of SDKs, bounds on size.
Never: checks what a field means, knows routes or futures.
"""
