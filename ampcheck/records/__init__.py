"""What a run recorded, frozen and without torch: what the checks of `ampcheck.checks` judge."""
