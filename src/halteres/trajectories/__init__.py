"""The trajectory server: scored groups in, exact batches out.

Owns: the Atropos API, the durable queue, batch forming, staleness, parking.
Never: samples, trains, judges a reward.

    socket ── server ── routes, http ── posted_group (bytes in), schema (messages)
                          │
                       service ── one decision for each question
                          │
                    group_commit ── begin ▸ decide, one after another ▸ commit ▸ answer
                          │            │
                          │         ingest         a posted group: queued, buffered, set aside
                          │         packing        which groups make the next batch
                          │         batches        a batch on its way to a trainer, and back
                          │            │ changes, which make up the `state`
                       stores/ ── SQLite and files of tokens, or PostgreSQL: what survives kill -9

    diagnostics says what is going on, and changes nothing.
"""
