"""Records of a run, frozen and without torch, which the checks of `ampcheck.checks` judge."""
