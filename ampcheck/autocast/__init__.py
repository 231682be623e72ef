"""What autocast does to each op: probed, shipped per release, asserted, locked, emulated, guarded."""
