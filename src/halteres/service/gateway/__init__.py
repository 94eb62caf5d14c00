"""The gateway: episodes of foreign programs, captured as what the policy is trained on.

A session is one episode. Its program calls the service as it would call any other, and each call
is a row of the journal whose outcome is a node: the prompt's token ids, those that were sampled,
their log-probabilities and policy versions. A reward ends the session; its branches are sequences.

    nodes ──▶ history (what of a new prompt was sampled before)    branches (what is trained on)
       ▲          pure                                                 pure
    capture (the nodes of one session; repeated requests)  ◀── sessions ──▶ groups ──▶ trajectory
                                                               gateway: all of it     server

Owns: gateway sessions, their keys, nodes and rewards; the groups that they make.
Never: samples by itself; changes a token that was sampled; speaks a dialect.
Guarantees: what is trained on is what the engine sampled, bit for bit, and was in the journal
before a client had it. A group is posted once, also across a restart.
"""
