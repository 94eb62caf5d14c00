"""A test of an environment before training: what rl_test_inference starts and reads.

    request ──▶ folder ─┆─▶ tester ──▶ the environment's `process` ──▶ relay ──▶ service or endpoint
                        ┆                  │ groups                      │ traffic
    answer ◀── report ◀─┆──────────────────┴─────────────────────────────┘

The dotted line is a process: the tester is detached, so a test outlives the call, and the host,
that started it. It works in one folder, HALTERES_HOME/tests/<test_id>, which everybody may read.
"""
