"""What a run will be before it begins: what it needs, what is there, and how long it will take.

Owns: the plan of a run (`plan.plan_run`, `reward_plan`), its checks, its estimate.
Never: changes anything; `runs.start` makes a plan a run.
"""
