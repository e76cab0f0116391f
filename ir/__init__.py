"""The expression language of mods, its analyses, block maps and the attention spec."""
