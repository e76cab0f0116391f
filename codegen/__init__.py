"""From an attention spec and a target to the source text of one kernel file."""
