"""What goes wrong in a run: the rules, and the alerts that they raise."""
