"""Is compiled code as near to float64 as rounding allows? See `judge`."""
