"""What every package uses: findings and runs, limits, subjects, formats, errors. Imports no torch at module level."""
