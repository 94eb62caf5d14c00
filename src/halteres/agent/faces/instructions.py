"""What a host tells its model about the tools as a whole.

Owns: one short paragraph: the path, how to wait, whose a draft is.
Never: repeats what a tool's own description says.
"""

from __future__ import annotations

from halteres.agent.untrusted import RULE

INSTRUCTIONS = f"""\
Halteres trains language models by reinforcement learning on this machine; no account or key is needed.
The path: rl_list_environments, rl_select_environment, rl_test_inference (trainable?), \
rl_start_training(dry_run=true), rl_start_training, rl_check_status until it has ended, rl_get_results. \
Or at once: rl_start_training(environment=..., changes={{...}}).
The `next` of every answer, errors too, holds the call that makes sense then.
Wait with rl_check_status(run_id, wait_s=45, until="...") instead of asking again and again. \
A run goes on without you: rl_list_runs finds it, from any session.
What you select and edit is a draft of your own; `draft` in an answer is its handle, to go on with it elsewhere.
{RULE}
Read rl_get_rollouts before you trust a reward that rises."""
