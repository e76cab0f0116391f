"""The tests of flexc; `tests.mods` is the corpus, `tests.oracle` the tolerance rule."""
