"""The training service: the Tinker API for every SDK, inference for everyone, keys.

Owns: what was accepted (the journal and its futures), training runs and their order, named weights,
sampling sessions, tenants and what each may have. `service` is all of it as one value, `server`
puts it on a socket, `fleet` knows the engines. Never: computes anything with weights (an engine
does), loads torch, lets one tenant's numbers depend on another's. Guarantees: what was accepted
outlives the process, and is executed in the order of its numbers, each at most once.

Each of these may import those before it: `wire`, `keys` and `limits`, `durable`, `checkpoints`,
`training_runs` (where a run's requests wait), `sampling`, `execution` (which brings back what an
engine lost), `service`, then `http`, `inference` and `routes`, which alone know HTTP.
"""
