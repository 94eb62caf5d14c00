"""Scripts run by the interpreter of an environment written for atroposlib; they import nothing of Halteres."""
