"""Groups on a trajectory server, for people and for files: looked at, written to JSONL, posted from it.

    reading ── told ──┬── parts ──┬── terminal
                      │           └── page
                      └── exporting         lines ── importing

Looking changes nothing on the server; only `importing` posts.
"""
