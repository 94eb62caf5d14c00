"""The page on the control server: runs, curves, alerts, rollouts, a button that stops."""
