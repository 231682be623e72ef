"""Effects of ops on values: one table, which every other room asks by `traits(op)`, and never by the name of an op."""
