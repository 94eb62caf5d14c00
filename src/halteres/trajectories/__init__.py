"""The trajectory server: scored groups in, exact batches out.

Owns: the Atropos API, the durable queue, batch forming, staleness, parking.
Never: samples, trains, judges a reward.

    socket ── server, app ── routes/ (who asks), wire/ (bytes in, bytes out)
                 │
              service ── one decision for each question
                 │
               turns ──── begin ▸ decide, one after another ▸ commit ▸ answer
                 │                       │
                 │            intake/      a posted group: queued, buffered, set aside
                 │            forming/     which groups make the next batch
                 │            delivering/  a batch on its way to a trainer, and back
                 │                       │ changes, which make up the `state`
              stores/ ── SQLite and files of tokens, or PostgreSQL: what survives kill -9

    reporting/ says what is going on, and changes nothing.
"""
