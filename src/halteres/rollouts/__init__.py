"""One rollout, one group: sampling with retries, limits and typed failures."""
