"""The training service: the Tinker API for every SDK, inference for everyone, keys.

Owns: what was accepted (the journal and its futures), training runs and their order, named weights, sampling sessions,
tenants and what each may have. `service` is all of it as one value, `server` puts it on a socket, `fleet` knows the
engines.
Never: computes anything with weights (an engine does), loads torch, lets one tenant's numbers depend on another's.
Guarantees: what was accepted outlives the process, and is executed in the order of its numbers, each at most once.

Sub-packages stand in this order, each above those that it may import: `wire`, `tenancy`, `durable`, `checkpoints`,
`sampling`, then `inference` and `routes`, which alone know HTTP. A training run's requests wait in `models`, are
executed by `execution`, and reach the engine through `adapters`, which brings back what an engine lost.
"""
