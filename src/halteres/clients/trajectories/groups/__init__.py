"""Groups on a trajectory server as data: listed, followed, read from lines, posted.

    told ── reading ── following        lines ── importing

Reading changes nothing on the server; only `importing` posts.
"""
