"""The trajectory server: scored groups in, exact batches out.

Owns: the Atropos API, the durable queue, batch forming, staleness, parking.
Never: samples, trains, judges a reward.

    app ── schema, scored, encoding, docs            the wire: what comes in, what goes out
     ├─ handover                                     batches on their way to the trainer
     └─ service ── decide, commit, answer
         ├─ intake, delivery, status, diagnostics    decisions, all over one `State`
         │   └─ state ── lanes, packing, environments
         └─ writer ── store ── sqlite, rows, tables  memory that survives kill -9
"""
