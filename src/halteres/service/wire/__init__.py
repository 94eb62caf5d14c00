"""The Tinker API's bodies, both ways; the schema is `tinker_public.proto`, which says how to regenerate the code."""
